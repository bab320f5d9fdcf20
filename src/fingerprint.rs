//! (stub)
pub mod form;
pub mod json;
