//! (stub)
pub mod accept;
pub mod complete;
pub mod forward;
pub mod headers;
pub mod pass;
pub mod reply;
pub mod reserve;
pub mod upstream;
