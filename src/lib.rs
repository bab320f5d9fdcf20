//! Oncegate, an idempotency gateway: a reverse proxy that makes retries of writes safe.
//!
//! ```text
//! accept -> route -> scope -> fingerprint -> reserve -> forward -> classify -> complete -> reply
//! ```
//!
//! Modules in reading order. Imports point at meaning, never at the next step: see `docs/architecture.md`.

pub mod backoff;
pub mod clock;
pub mod record;

pub mod fingerprint;
pub mod scope;

pub mod route;

pub mod explain;
pub mod fault;
pub mod identity;
pub mod net;
pub mod tasks;
pub mod telemetry;

pub mod store;

pub mod gateway;
pub mod lease;
pub mod relay;
pub mod sweep;

pub mod admin;

pub mod cli;
pub mod config;
pub mod demo;
