//! Without the feature: nothing.

use std::future::{Ready, ready};

use super::Point;

/// A fault that was asked for: there is none.
#[derive(Debug, thiserror::Error)]
pub enum Injected {}

/// Nothing to read.
///
/// # Errors
/// None.
#[inline]
pub fn arm() -> Result<(), String> {
    Ok(())
}

/// No variable is ours.
#[inline]
#[must_use]
pub fn is_variable(_: &str) -> bool {
    false
}

/// Passes.
#[inline]
pub fn point(_: Point) -> Ready<()> {
    ready(())
}

/// Passes.
#[inline]
pub fn point_blocking(_: Point) {}

/// Passes.
#[inline]
pub fn fallible(_: Point) -> Ready<Result<(), Injected>> {
    ready(Ok(()))
}
