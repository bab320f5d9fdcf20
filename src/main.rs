//! The `oncegate` program.

fn main() {}
