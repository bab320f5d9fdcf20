//! Where a value of the configuration stands, and what is wrong with it.
//!
//! Everything that reads reports its mistakes to one [`Diagnostics`] and goes on, so that one run shows all of them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;

/// Where a value stands.
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
    /// The location of a field that stands nowhere.
    #[must_use]
    pub(super) fn absent(path: &str) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// The location of a field of the thing at this location.
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
    /// Where it stands.
    pub(super) location: Location,
}

/// A sentence about a location: what is wrong with it or unsafe about it, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Diagnostic {
    /// Where.
    pub(super) location: Location,
    /// What.
    pub(super) text: String,
}

/// Mistakes and warnings, collected by everything that reads.
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

    /// Reports that a field is missing, unless it is there and its mistake is reported already.
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

    /// Reports something that may stand but should be known.
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
            // A mistake in [policy] is found again for each route.
            if !mistakes.contains(&diagnostic) {
                mistakes.push(diagnostic);
            }
        }
        mistakes.sort_by_key(|diagnostic| diagnostic.location.line.unwrap_or(usize::MAX));
        (mistakes, self.warnings.into_inner())
    }

    /// Takes down that a field was asked for.
    pub(super) fn asked(&self, path: &str) {
        self.asked.borrow_mut().insert(path.to_owned());
    }

    /// The paths of all fields that were asked for, without indices.
    #[cfg(test)]
    pub(super) fn all_asked(&self) -> BTreeSet<String> {
        self.asked.borrow().clone()
    }
}
