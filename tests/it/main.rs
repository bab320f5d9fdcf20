//! The integration tests: one binary, modules in the order of the promises.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::cast_possible_truncation,
    reason = "a helper of a test that panics fails the test, as it should"
)]

mod support;

mod proxy;
mod upstream;
