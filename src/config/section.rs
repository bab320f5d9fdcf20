//! The reader of the configuration's sections: typed values by the names of fields.
//!
//! A [`Section`] reports a mistake in the shared [`Diagnostics`] and treats the field as absent, so that one run shows all
//! mistakes.
//!
//! Invariant: `config/file.rs` reads every known field by name, whatever the file holds. [`Section::finish`] reports the
//! other fields as unknown, and finds the nearest match among the names that were read.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytesize::ByteSize;

use crate::config::diagnostics::{Diagnostics, Location, Spanned};
use crate::config::tree::{Node, Value};

/// The longest duration: 100 years of 365.25 days.
const CENTURY: Duration = Duration::from_secs(36_525 * 86_400);

/// A field that may be either.
pub(super) enum TextOrSection<'a> {
    /// A text.
    Text(Spanned<String>),
    /// A table.
    Section(Section<'a>),
}

/// One table of the tree, read field by field.
pub(super) struct Section<'a> {
    fields: BTreeMap<&'a str, &'a Node>,
    known: BTreeSet<&'static str>,
    location: Location,
    diagnostics: &'a Diagnostics,
}

impl<'a> Section<'a> {
    /// The top level.
    #[must_use]
    pub(super) fn top(tree: &'a Node, diagnostics: &'a Diagnostics) -> Self {
        Self::of(tree, Location::default(), diagnostics)
    }

    fn of(node: &'a Node, location: Location, diagnostics: &'a Diagnostics) -> Self {
        let fields = match &node.value {
            Value::Table(fields) => {
                fields.iter().map(|(name, field)| (name.as_str(), field)).collect()
            }
            Value::Text(_)
            | Value::Integer(_)
            | Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_)
            | Value::Array(_) => {
                diagnostics.mistake(
                    &location,
                    format!("this is {}, it must be a table", node.value.kind()),
                );
                BTreeMap::new()
            }
        };
        Self { fields, known: BTreeSet::new(), location, diagnostics }
    }

    /// The location of this section.
    #[must_use]
    pub(super) fn location(&self) -> &Location {
        &self.location
    }

    fn ask(&mut self, name: &'static str) -> Option<Spanned<&'a Node>> {
        self.known.insert(name);
        let path = self.location.field(name).path;
        self.diagnostics.asked(&without_indices(&path));
        let node = *self.fields.get(name)?;
        Some(Spanned { value: node, location: node.location(path) })
    }

    /// A text.
    pub(super) fn text(&mut self, name: &'static str) -> Option<Spanned<String>> {
        let node = self.ask(name)?;
        self.text_of(&node)
    }

    fn text_of(&self, node: &Spanned<&Node>) -> Option<Spanned<String>> {
        if let Value::Text(text) = &node.value.value {
            return Some(Spanned { value: text.clone(), location: node.location.clone() });
        }
        self.wrong_kind(node, "a text in quotes");
        None
    }

    /// A duration: `"10s"`, `"24h"`, `"500ms"`.
    pub(super) fn duration(&mut self, name: &'static str) -> Option<Spanned<Duration>> {
        const HOW: &str = "write a duration with its unit, such as \"500ms\", \"10s\" or \"24h\"";
        let node = self.ask(name)?;
        let Value::Text(text) = &node.value.value else {
            self.diagnostics
                .mistake(&node.location, format!("this is {}; {HOW}", node.value.value.kind()));
            return None;
        };
        match humantime::parse_duration(text) {
            Ok(value) => self.no_longer_than_a_century(Spanned { value, location: node.location }),
            Err(_) => {
                self.diagnostics
                    .mistake(&node.location, format!("{text:?} is not a duration; {HOW}"));
                None
            }
        }
    }

    /// A longer duration, added to a time, would give a time that cannot be written.
    fn no_longer_than_a_century(&mut self, read: Spanned<Duration>) -> Option<Spanned<Duration>> {
        if read.value <= CENTURY {
            return Some(read);
        }
        self.diagnostics.mistake(&read.location, "must be 100 years at most".to_owned());
        None
    }

    /// A duration, or `word` for none.
    pub(super) fn duration_or(
        &mut self,
        name: &'static str,
        word: &str,
    ) -> Option<Spanned<Option<Duration>>> {
        let node = self.ask(name)?;
        let read = |text: &str| match text == word {
            true => Some(None),
            false => humantime::parse_duration(text).ok().map(Some),
        };
        let text = if let Value::Text(text) = &node.value.value { text } else { "" };
        let Some(value) = read(text) else {
            let text = format!("must be {word:?}, or a duration with its unit such as \"500ms\"");
            self.diagnostics.mistake(&node.location, text);
            return None;
        };
        let Some(value) = value else {
            return Some(Spanned { value: None, location: node.location });
        };
        let Spanned { value, location } =
            self.no_longer_than_a_century(Spanned { value, location: node.location })?;
        Some(Spanned { value: Some(value), location })
    }

    /// A size: `"1MiB"`, or an integer of bytes.
    pub(super) fn size(&mut self, name: &'static str) -> Option<Spanned<usize>> {
        const HOW: &str = "write a size such as \"64KiB\" or \"1MiB\", or a number of bytes";
        let node = self.ask(name)?;
        let bytes = match &node.value.value {
            Value::Text(text) => text.parse::<ByteSize>().ok().map(|size| size.as_u64()),
            Value::Integer(number) => number.and_then(|number| u64::try_from(number).ok()),
            Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_) => None,
        };
        match bytes.and_then(|bytes| usize::try_from(bytes).ok()) {
            Some(value) => Some(Spanned { value, location: node.location }),
            None => {
                self.diagnostics.mistake(&node.location, format!("not a size; {HOW}"));
                None
            }
        }
    }

    /// A whole number within a range.
    pub(super) fn number(
        &mut self,
        name: &'static str,
        range: std::ops::RangeInclusive<u32>,
    ) -> Option<Spanned<u32>> {
        let node = self.ask(name)?;
        let number = match &node.value.value {
            Value::Integer(number) => *number,
            Value::Text(text) if node.location.variable.is_some() => text.parse().ok(),
            Value::Text(_)
            | Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_) => None,
        };
        let fitting = number.and_then(|n| u32::try_from(n).ok()).filter(|n| range.contains(n));
        if let Some(value) = fitting {
            return Some(Spanned { value, location: node.location });
        }
        let (low, high) = (range.start(), range.end());
        self.diagnostics
            .mistake(&node.location, format!("must be a whole number from {low} to {high}"));
        None
    }

    /// `true` or `false`.
    pub(super) fn flag(&mut self, name: &'static str) -> Option<Spanned<bool>> {
        let node = self.ask(name)?;
        let flag = match &node.value.value {
            Value::Boolean(flag) => Some(*flag),
            Value::Text(text) if node.location.variable.is_some() => text.parse().ok(),
            Value::Text(_)
            | Value::Integer(_)
            | Value::Float(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_) => None,
        };
        if let Some(value) = flag {
            return Some(Spanned { value, location: node.location });
        }
        self.wrong_kind(&node, "true or false, without quotes");
        None
    }

    /// A list of texts.
    pub(super) fn texts(&mut self, name: &'static str) -> Option<Spanned<Vec<Spanned<String>>>> {
        self.list(name, "a list of texts", |section, item| section.text_of(item))
    }

    /// One text, or a list of them.
    pub(super) fn text_or_texts(
        &mut self,
        name: &'static str,
    ) -> Option<Spanned<Vec<Spanned<String>>>> {
        let node = self.ask(name)?;
        if let Value::Text(text) = &node.value.value {
            let one = Spanned { value: text.clone(), location: node.location.clone() };
            return Some(Spanned { value: vec![one], location: node.location });
        }
        self.texts(name)
    }

    /// A word, or a table in its place.
    pub(super) fn text_or_section(&mut self, name: &'static str) -> Option<TextOrSection<'a>> {
        let node = self.ask(name)?;
        Some(Self::text_or_table(node.value, node.location, self.diagnostics))
    }

    fn text_or_table(
        node: &'a Node,
        location: Location,
        diagnostics: &'a Diagnostics,
    ) -> TextOrSection<'a> {
        match &node.value {
            Value::Text(text) => TextOrSection::Text(Spanned { value: text.clone(), location }),
            Value::Integer(_)
            | Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_) => TextOrSection::Section(Self::of(node, location, diagnostics)),
        }
    }

    /// The fields of a table whose names are free, each a word or a table: `headers = { NAME = "..." }`.
    pub(super) fn named_texts_or_sections(
        &mut self,
        name: &'static str,
    ) -> Vec<(String, TextOrSection<'a>)> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let outer = Self::of(node.value, node.location, self.diagnostics);
        let read = |(name, field): (&&'a str, &&'a Node)| {
            let location = field.location(outer.location.field(name).path);
            ((*name).to_owned(), Self::text_or_table(field, location, self.diagnostics))
        };
        outer.fields.iter().map(read).collect()
    }

    /// A planned field: using it is a mistake, for the reason given.
    pub(super) fn refused(&mut self, name: &'static str, why: &str) {
        if let Some(node) = self.fields.get(name) {
            self.known.insert(name);
            let location = node.location(self.location.field(name).path);
            self.diagnostics.mistake(&location, why);
        }
    }

    /// A list of texts or integers, as texts.
    pub(super) fn codes(&mut self, name: &'static str) -> Option<Spanned<Vec<Spanned<String>>>> {
        self.list(name, "a list of statuses", |section, item| match &item.value.value {
            Value::Integer(Some(number)) => {
                Some(Spanned { value: number.to_string(), location: item.location.clone() })
            }
            Value::Text(_)
            | Value::Integer(None)
            | Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_) => section.text_of(item),
        })
    }

    fn list<T>(
        &mut self,
        name: &'static str,
        must: &str,
        read: impl Fn(&Self, &Spanned<&Node>) -> Option<T>,
    ) -> Option<Spanned<Vec<T>>> {
        let node = self.ask(name)?;
        let Value::Array(items) = &node.value.value else {
            self.wrong_kind(&node, must);
            return None;
        };
        let spanned = items.iter().enumerate().map(|(index, item)| Spanned {
            value: item,
            location: item.location(format!("{}[{index}]", node.location)),
        });
        let value = spanned.filter_map(|item| read(self, &item)).collect();
        Some(Spanned { value, location: node.location })
    }

    /// Any value, as JSON.
    pub(super) fn any(&mut self, name: &'static str) -> Option<Spanned<serde_json::Value>> {
        let node = self.ask(name)?;
        Some(Spanned { value: node.value.to_json(), location: node.location })
    }

    /// A table within this one.
    pub(super) fn section(&mut self, name: &'static str) -> Option<Self> {
        let node = self.ask(name)?;
        Some(Self::of(node.value, node.location, self.diagnostics))
    }

    /// A list of tables: `[[route]]`.
    pub(super) fn sections(&mut self, name: &'static str) -> Vec<Self> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let Value::Array(items) = &node.value.value else {
            self.wrong_kind(&node, &format!("a list of tables: write [[{}]]", node.location));
            return Vec::new();
        };
        let read = |(index, item): (usize, &'a Node)| {
            Self::of(item, item.location(format!("{}[{index}]", node.location)), self.diagnostics)
        };
        items.iter().enumerate().map(read).collect()
    }

    /// The tables of a table whose names are free: `[upstreams.NAME]`.
    pub(super) fn named_sections(&mut self, name: &'static str) -> Vec<(String, Self)> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let outer = Self::of(node.value, node.location, self.diagnostics);
        let read = |(name, field): (&&'a str, &&'a Node)| {
            let location = field.location(outer.location.field(name).path);
            ((*name).to_owned(), Self::of(field, location, self.diagnostics))
        };
        outer.fields.iter().map(read).collect()
    }

    /// The texts of a table whose names are free: `xml_namespaces = { p = "..." }`.
    pub(super) fn named_texts(&mut self, name: &'static str) -> Vec<(String, Spanned<String>)> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let outer = Self::of(node.value, node.location, self.diagnostics);
        let read = |(name, field): (&&'a str, &&'a Node)| {
            let location = field.location(outer.location.field(name).path);
            let text = outer.text_of(&Spanned { value: *field, location })?;
            Some(((*name).to_owned(), text))
        };
        outer.fields.iter().filter_map(read).collect()
    }

    /// Reports every field that was not read as unknown.
    pub(super) fn finish(self) {
        for (name, node) in &self.fields {
            if self.known.contains(name) {
                continue;
            }
            let location = node.location(self.location.field(name).path);
            self.diagnostics
                .mistake(&location, unknown("unknown field", name, self.known.iter().copied()));
        }
    }

    fn wrong_kind(&self, node: &Spanned<&Node>, must: &str) {
        let is = node.value.value.kind();
        self.diagnostics.mistake(&node.location, format!("this is {is}, it must be {must}"));
    }
}

/// The message about an unknown name: `what` ("unknown field"), and its nearest match.
pub(super) fn unknown<'n>(what: &str, name: &str, known: impl Iterator<Item = &'n str>) -> String {
    let known: Vec<&str> = known.collect();
    let nearest = known
        .iter()
        .map(|candidate| (strsim::jaro_winkler(name, candidate), *candidate))
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    match nearest {
        Some((_, candidate)) => format!("{what}; did you mean `{candidate}`?"),
        None if known.is_empty() => format!("{what}; there is none"),
        None => format!("{what}; known here: {}", known.join(", ")),
    }
}

fn without_indices(path: &str) -> String {
    let mut bare = String::with_capacity(path.len());
    let mut inside = false;
    for c in path.chars() {
        match c {
            '[' => inside = true,
            ']' => inside = false,
            c if !inside => bare.push(c),
            _ => {}
        }
    }
    bare
}
