//! Locations of values in the configuration, and mistakes and warnings about them.
//!
//! All readers report to one [`Diagnostics`] and go on after a mistake, so that one run shows all mistakes.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;

/// The location of a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Location {
    /// `route[2].fingerprint.ignore[0]`; empty for the file as a whole.
    pub(super) path: String,
    /// Line in the file, from 1; `None` where the value is not in the file.
    pub(super) line: Option<usize>,
    /// The environment variable that gave the value.
    pub(super) variable: Option<String>,
}

impl Location {
    /// The location of a field that is not in the configuration.
    #[must_use]
    pub(super) fn absent(path: &str) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// The location of a field of this section.
    #[must_use]
    pub(super) fn field(&self, name: &str) -> Self {
        let path = if self.path.is_empty() { name.to_owned() } else { format!("{self}.{name}") };
        Self { path, ..self.clone() }
    }
}

/// The path alone.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

/// A value with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spanned<T> {
    /// The value.
    pub(super) value: T,
    /// Its location.
    pub(super) location: Location,
}

/// A mistake or a warning: what is wrong or unsafe at a location, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Diagnostic {
    /// Where.
    pub(super) location: Location,
    /// What.
    pub(super) text: String,
}

/// The mistakes and warnings that all readers report.
#[derive(Debug, Default)]
pub(super) struct Diagnostics {
    mistakes: RefCell<Vec<Diagnostic>>,
    warnings: RefCell<Vec<Diagnostic>>,
    asked: RefCell<BTreeSet<String>>,
}

impl Diagnostics {
    /// Reports a mistake.
    pub(super) fn mistake(&self, location: &Location, text: impl Into<String>) {
        self.mistakes
            .borrow_mut()
            .push(Diagnostic { location: location.clone(), text: text.into() });
    }

    /// Reports that a field is missing, unless a mistake in that field is already reported.
    pub(super) fn missing(&self, location: &Location) {
        if !self.has_mistake_under(location) {
            self.mistake(location, "is missing");
        }
    }

    /// Whether a mistake is reported at this location or within it.
    #[must_use]
    pub(super) fn has_mistake_under(&self, location: &Location) -> bool {
        self.mistakes
            .borrow()
            .iter()
            .any(|diagnostic| diagnostic.location.path.starts_with(&location.path))
    }

    /// Reports a valid value that may be unsafe.
    pub(super) fn warning(&self, location: &Location, text: impl Into<String>) {
        self.warnings
            .borrow_mut()
            .push(Diagnostic { location: location.clone(), text: text.into() });
    }

    /// All mistakes in the order of their locations, and all warnings.
    #[must_use]
    pub(super) fn into_parts(self) -> (Vec<Diagnostic>, Vec<Diagnostic>) {
        let mut mistakes: Vec<Diagnostic> = Vec::new();
        for diagnostic in self.mistakes.into_inner() {
            // Each route finds the mistakes in [policy] again.
            if !mistakes.contains(&diagnostic) {
                mistakes.push(diagnostic);
            }
        }
        mistakes.sort_by_key(|diagnostic| diagnostic.location.line.unwrap_or(usize::MAX));
        (mistakes, self.warnings.into_inner())
    }

    /// Notes that a field was read.
    pub(super) fn asked(&self, path: &str) {
        self.asked.borrow_mut().insert(path.to_owned());
    }

    /// The paths of all fields that were read, without indices.
    #[cfg(test)]
    pub(super) fn all_asked(&self) -> BTreeSet<String> {
        self.asked.borrow().clone()
    }
}
