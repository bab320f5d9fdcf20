//! The vocabulary of the tests.

pub(crate) mod shelf;
