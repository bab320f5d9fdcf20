//! What every route's settings are read with, and look-ups' too.

use super::{BTreeMap, Builder, DEFAULT_UPSTREAM, File, Spanned, unknown, upstream};
use crate::record::event::subscription::Subscriber;

/// What all routes need.
pub(super) struct Common<'f> {
    pub(super) file: &'f File,
    pub(super) sinks: &'f [Subscriber],
    pub(super) upstreams: &'f BTreeMap<String, upstream::Settings>,
}

impl Builder<'_> {
    /// The name of an upstream. One that is not defined is a mistake.
    pub(super) fn named_upstream(
        &self,
        named: Option<&Spanned<String>>,
        common: &Common<'_>,
    ) -> Option<String> {
        let named = named?;
        let defined = named.value == DEFAULT_UPSTREAM
            || common.file.upstreams.iter().any(|(name, _)| *name == named.value);
        if !defined {
            let names = common.upstreams.keys().map(String::as_str);
            let hint = unknown("no such upstream", &named.value, names);
            self.diagnostics.mistake(&named.location, hint);
        }
        Some(named.value.clone())
    }
}
