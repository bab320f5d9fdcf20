//! (stub)
pub mod sink;
