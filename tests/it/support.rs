//! The vocabulary of the integration tests.

pub(crate) mod proxy;
pub(crate) mod raw;
pub(crate) mod upstream;
