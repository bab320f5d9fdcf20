//! (stub)
pub mod file;
