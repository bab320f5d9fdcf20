//! The integration tests: one binary, a module for each part.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics fails, which is what it is for"
)]

mod support;

mod admin;
mod cli;
