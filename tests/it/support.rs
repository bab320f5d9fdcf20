//! What the tests need around the program.

pub(crate) mod postgres;
