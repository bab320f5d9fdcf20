//! The integration tests: one binary, modules by part.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests are tests, too: a failure here fails the test"
)]

mod support;

mod sqlite;
mod store;
