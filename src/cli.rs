//! The commands: what a person types, and what is wired from it.

pub mod events;
pub mod print;
pub mod records;
