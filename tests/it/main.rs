//! The integration tests: one binary, modules in the order of the promises.

mod support;

mod proxy;
mod upstream;
