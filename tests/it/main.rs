//! The integration tests: one binary, a module for each part, in the order of the promises.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::cast_possible_truncation,
    clippy::let_underscore_must_use,
    clippy::large_futures,
    clippy::too_many_lines,
    clippy::excessive_nesting,
    unreachable_pub,
    missing_docs,
    reason = "a test that panics fails, which is what it is for"
)]

mod support;

mod acceptance;
mod acceptance_relay;
mod admin;
mod admin_records;
mod alerts;
mod attacks;
mod backlog;
mod brokers;
mod bypass;
mod checked;
mod checker;
mod claims;
mod cli;
mod clocks;
mod codings;
mod commands;
mod container;
mod cors;
mod crash;
mod crash_points;
mod database_setup;
mod database_tls;
mod dead;
mod deploy;
mod doubt;
mod explain;
mod files;
mod fingerprint;
mod functions;
mod gone_sinks;
mod housekeeping;
mod keep_alive;
mod late;
mod lease;
mod logging;
mod lookup;
mod losses;
mod metrics;
mod negotiation;
mod observe;
mod one_file;
mod order;
mod outage;
mod outcomes;
mod overload;
mod pause;
mod pgbouncer;
mod postgres;
mod proxy;
mod recipes;
mod refusals;
mod relay;
mod relays;
mod replay_auth;
mod replicas;
mod reports_a;
mod reports_b;
mod reports_b_bodies;
mod reports_c;
mod reports_d;
mod reports_retry;
mod sealed;
mod servers;
mod shutdown;
mod smuggling;
mod spill;
mod spill_gone;
mod sqlite;
mod standby;
mod store;
mod storm;
mod sweep;
mod tenants;
mod tokens;
mod transition;
mod tunnels;
mod unknown_events;
mod upstream;
mod wait;
mod watched;
mod webhooks;
mod went_back;
