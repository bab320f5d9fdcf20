//! The configuration as a tree in which each value knows where it stands, and the reader of its sections.
//!
//! A file becomes a tree of [`Node`]s with line numbers; `ONCEGATE_*` variables are laid over it and keep their
//! own name as their location. A [`Section`] hands out typed values by field name. It never stops at a mistake: it
//! reports it in the shared [`Diagnostics`] and answers as if the field were absent, so that one run shows all mistakes.
//!
//! What must stay true: every field that the program knows is asked for by name on every path through
//! `config/file.rs`, because [`Section::finish`] reports whatever was not asked for as unknown, and finds its
//! nearest match among the names that were.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;
use toml::de::{DeTable, DeValue};

/// The longest duration: 100 years of 365.25 days.
const CENTURY: Duration = Duration::from_secs(36_525 * 86_400);

/// Where a value stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// `route[2].fingerprint.ignore[0]`; empty for the file as a whole.
    pub path: String,
    /// Line in the file, from 1; `None` where the value is not in the file.
    pub line: Option<usize>,
    /// The environment variable that gave the value.
    pub variable: Option<String>,
}

impl Location {
    /// The location of a field that stands nowhere.
    #[must_use]
    pub fn absent(path: &str) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// The location of a field of the thing at this location.
    #[must_use]
    pub fn field(&self, name: &str) -> Self {
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
pub struct Spanned<T> {
    /// The value.
    pub value: T,
    /// Where it stands.
    pub location: Location,
}

/// A sentence about a location: what is wrong with it or unsafe about it, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Where.
    pub location: Location,
    /// What.
    pub text: String,
}

/// Mistakes and warnings, collected by everything that reads.
#[derive(Debug, Default)]
pub struct Diagnostics {
    mistakes: RefCell<Vec<Diagnostic>>,
    warnings: RefCell<Vec<Diagnostic>>,
    asked: RefCell<BTreeSet<String>>,
}

impl Diagnostics {
    /// Reports a mistake.
    pub fn mistake(&self, location: &Location, text: impl Into<String>) {
        self.mistakes
            .borrow_mut()
            .push(Diagnostic { location: location.clone(), text: text.into() });
    }

    /// Reports that a field is missing, unless it is there and its mistake is reported already.
    pub fn missing(&self, location: &Location) {
        if !self.has_mistake_under(location) {
            self.mistake(location, "is missing");
        }
    }

    /// Whether a mistake is reported at this location or within it.
    #[must_use]
    pub fn has_mistake_under(&self, location: &Location) -> bool {
        self.mistakes
            .borrow()
            .iter()
            .any(|diagnostic| diagnostic.location.path.starts_with(&location.path))
    }

    /// Reports something that may stand but should be known.
    pub fn warning(&self, location: &Location, text: impl Into<String>) {
        self.warnings
            .borrow_mut()
            .push(Diagnostic { location: location.clone(), text: text.into() });
    }

    /// All mistakes in the order of their locations, and all warnings.
    #[must_use]
    pub fn into_parts(self) -> (Vec<Diagnostic>, Vec<Diagnostic>) {
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

    /// The paths of all fields that were asked for, without indices.
    #[cfg(test)]
    pub(crate) fn asked(&self) -> BTreeSet<String> {
        self.asked.borrow().clone()
    }
}

/// A value of the tree.
#[derive(Clone, Debug)]
pub struct Node {
    value: Value,
    line: Option<usize>,
    variable: Option<String>,
}

#[derive(Clone, Debug)]
enum Value {
    Text(String),
    Integer(Option<i64>),
    Float(f64),
    Boolean(bool),
    Datetime(String),
    Array(Vec<Node>),
    Table(BTreeMap<String, Node>),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a text",
            Self::Integer(_) => "an integer",
            Self::Float(_) => "a number with a fraction",
            Self::Boolean(_) => "true or false",
            Self::Datetime(_) => "a date",
            Self::Array(_) => "a list",
            Self::Table(_) => "a table",
        }
    }
}

/// The tree of a TOML text; the first error of its syntax is reported.
#[must_use]
pub fn parse(text: &str, diagnostics: &Diagnostics) -> Node {
    let (document, errors) = DeTable::parse_recoverable(text);
    // The first only: what the parser meets after it is mostly the same mistake again.
    let start = |error: &&toml::de::Error| error.span().map_or(0, |span| span.start);
    if let Some(error) = errors.iter().min_by_key(start) {
        let line = error.span().map(|span| line_of(text, span.start));
        diagnostics.mistake(
            &Location { line, ..Location::default() },
            format!("not TOML: {}", error.message()),
        );
    }
    from_table(document.get_ref(), text, Some(1))
}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

fn from_table(table: &DeTable<'_>, text: &str, line: Option<usize>) -> Node {
    let fields = table
        .iter()
        .map(|(key, value)| {
            let mut node = from_value(value.get_ref(), text, value.span().start);
            // A section stands where its own name stands.
            node.line = Some(line_of(text, key.span().start));
            (key.get_ref().to_string(), node)
        })
        .collect();
    Node { value: Value::Table(fields), line, variable: None }
}

fn from_value(value: &DeValue<'_>, text: &str, start: usize) -> Node {
    let line = Some(line_of(text, start));
    let value = match value {
        DeValue::String(string) => Value::Text(string.to_string()),
        DeValue::Integer(number) => {
            Value::Integer(i64::from_str_radix(number.as_str(), number.radix()).ok())
        }
        DeValue::Float(number) => Value::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => Value::Boolean(*flag),
        DeValue::Datetime(date) => Value::Datetime(date.to_string()),
        DeValue::Array(items) => Value::Array(
            items.iter().map(|item| from_value(item.get_ref(), text, item.span().start)).collect(),
        ),
        DeValue::Table(table) => return from_table(table, text, line),
    };
    Node { value, line, variable: None }
}

impl Node {
    /// A tree without anything in it.
    #[must_use]
    pub fn empty() -> Self {
        Self { value: Value::Table(BTreeMap::new()), line: None, variable: None }
    }

    /// Whether the top level has this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        matches!(&self.value, Value::Table(fields) if fields.contains_key(name))
    }

    /// Lays the value of a variable over `section.field`. A value that begins with `{` or `[` is TOML.
    pub fn overlay(
        &mut self,
        section: &str,
        field: &str,
        variable: &str,
        value: &str,
        diagnostics: &Diagnostics,
    ) {
        let mut node = from_variable(value, variable, diagnostics);
        node.mark(variable);
        let Value::Table(sections) = &mut self.value else { return };
        let section = sections.entry(section.to_owned()).or_insert_with(Self::empty);
        if let Value::Table(fields) = &mut section.value {
            fields.insert(field.to_owned(), node);
        }
    }

    fn mark(&mut self, variable: &str) {
        self.line = None;
        self.variable = Some(variable.to_owned());
        match &mut self.value {
            Value::Array(items) => items.iter_mut().for_each(|item| item.mark(variable)),
            Value::Table(fields) => fields.values_mut().for_each(|field| field.mark(variable)),
            Value::Text(_)
            | Value::Integer(_)
            | Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_) => {}
        }
    }

    fn location(&self, path: String) -> Location {
        Location { path, line: self.line, variable: self.variable.clone() }
    }

    fn to_json(&self) -> serde_json::Value {
        match &self.value {
            Value::Text(text) | Value::Datetime(text) => text.as_str().into(),
            Value::Integer(number) => (*number).into(),
            Value::Float(number) => (*number).into(),
            Value::Boolean(flag) => (*flag).into(),
            Value::Array(items) => items.iter().map(Self::to_json).collect(),
            Value::Table(fields) => serde_json::Value::Object(
                fields.iter().map(|(name, field)| (name.clone(), field.to_json())).collect(),
            ),
        }
    }
}

fn from_variable(value: &str, variable: &str, diagnostics: &Diagnostics) -> Node {
    let text = Node { value: Value::Text(value.to_owned()), line: None, variable: None };
    if !value.starts_with(['{', '[']) {
        return text;
    }
    match DeValue::parse(value) {
        Ok(parsed) => from_value(parsed.get_ref(), value, 0),
        Err(error) => {
            let variable = Some(variable.to_owned());
            let location = Location { variable, ..Location::default() };
            diagnostics.mistake(&location, format!("not a TOML value: {}", error.message()));
            text
        }
    }
}

/// A field that may be either.
pub enum TextOrSection<'a> {
    /// A text.
    Text(Spanned<String>),
    /// A table.
    Section(Section<'a>),
}

/// One table of the tree, read field by field.
pub struct Section<'a> {
    fields: BTreeMap<&'a str, &'a Node>,
    known: BTreeSet<&'static str>,
    location: Location,
    diagnostics: &'a Diagnostics,
}

impl<'a> Section<'a> {
    /// The top level.
    #[must_use]
    pub fn top(tree: &'a Node, diagnostics: &'a Diagnostics) -> Self {
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

    /// Where this section stands.
    #[must_use]
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// The names that are in it.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.fields.keys().copied()
    }

    /// Whether a field is there.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    fn ask(&mut self, name: &'static str) -> Option<Spanned<&'a Node>> {
        self.known.insert(name);
        let path = self.location.field(name).path;
        self.diagnostics.asked.borrow_mut().insert(without_indices(&path));
        let node = *self.fields.get(name)?;
        Some(Spanned { value: node, location: node.location(path) })
    }

    /// A field read by `read`, which says what is wrong with it.
    pub fn read<T>(
        &mut self,
        name: &'static str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Spanned<T>> {
        let text = self.text(name)?;
        match read(&text.value) {
            Ok(value) => Some(Spanned { value, location: text.location }),
            Err(wrong) => {
                self.diagnostics.mistake(&text.location, wrong);
                None
            }
        }
    }

    /// A text.
    pub fn text(&mut self, name: &'static str) -> Option<Spanned<String>> {
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
    pub fn duration(&mut self, name: &'static str) -> Option<Spanned<Duration>> {
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

    /// Beyond that, times that a duration is added to could not be written any more.
    fn no_longer_than_a_century(&mut self, read: Spanned<Duration>) -> Option<Spanned<Duration>> {
        if read.value <= CENTURY {
            return Some(read);
        }
        self.diagnostics.mistake(&read.location, "must be 100 years at most".to_owned());
        None
    }

    /// A duration, or `word` for none.
    pub fn duration_or(
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
    pub fn size(&mut self, name: &'static str) -> Option<Spanned<usize>> {
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
    pub fn number(
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
    pub fn flag(&mut self, name: &'static str) -> Option<Spanned<bool>> {
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
    pub fn texts(&mut self, name: &'static str) -> Option<Spanned<Vec<Spanned<String>>>> {
        self.list(name, "a list of texts", |section, item| section.text_of(item))
    }

    /// One text, or a list of them.
    pub fn text_or_texts(&mut self, name: &'static str) -> Option<Spanned<Vec<Spanned<String>>>> {
        let node = self.ask(name)?;
        if let Value::Text(text) = &node.value.value {
            let one = Spanned { value: text.clone(), location: node.location.clone() };
            return Some(Spanned { value: vec![one], location: node.location });
        }
        self.texts(name)
    }

    /// A word, or a table with more to say.
    pub fn text_or_section(&mut self, name: &'static str) -> Option<TextOrSection<'a>> {
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
    pub fn named_texts_or_sections(
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

    /// A field that means nothing so far: using it is a mistake, and this is why.
    pub fn refused(&mut self, name: &'static str, why: &str) {
        if let Some(node) = self.fields.get(name) {
            self.known.insert(name);
            let location = node.location(self.location.field(name).path);
            self.diagnostics.mistake(&location, why);
        }
    }

    /// A list of texts or integers, as texts.
    pub fn codes(&mut self, name: &'static str) -> Option<Spanned<Vec<Spanned<String>>>> {
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
    pub fn any(&mut self, name: &'static str) -> Option<Spanned<serde_json::Value>> {
        let node = self.ask(name)?;
        Some(Spanned { value: node.value.to_json(), location: node.location })
    }

    /// A table within this one.
    pub fn section(&mut self, name: &'static str) -> Option<Self> {
        let node = self.ask(name)?;
        Some(Self::of(node.value, node.location, self.diagnostics))
    }

    /// A list of tables: `[[route]]`.
    pub fn sections(&mut self, name: &'static str) -> Vec<Self> {
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
    pub fn named_sections(&mut self, name: &'static str) -> Vec<(String, Self)> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let outer = Self::of(node.value, node.location, self.diagnostics);
        let read = |(name, field): (&&'a str, &&'a Node)| {
            let location = field.location(outer.location.field(name).path);
            ((*name).to_owned(), Self::of(field, location, self.diagnostics))
        };
        outer.fields.iter().map(read).collect()
    }

    /// The texts of a table whose names are free: `xml_namespaces = { p = "..." }`.
    pub fn named_texts(&mut self, name: &'static str) -> Vec<(String, Spanned<String>)> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let outer = Self::of(node.value, node.location, self.diagnostics);
        let read = |(name, field): (&&'a str, &&'a Node)| {
            let location = field.location(outer.location.field(name).path);
            let text = outer.text_of(&Spanned { value: *field, location })?;
            Some(((*name).to_owned(), text))
        };
        outer.fields.iter().filter_map(read).collect()
    }

    /// A choice of which so far only `works` does anything.
    pub fn only(&mut self, name: &'static str, works: &str, later: &[&str]) {
        let Some(text) = self.text(name) else { return };
        if text.value == works {
            return;
        }
        let wrong = if later.contains(&text.value.as_str()) {
            format!("{:?} is not supported yet; only {works:?} is", text.value)
        } else {
            format!("must be {works:?}")
        };
        self.diagnostics.mistake(&text.location, wrong);
    }

    /// Fields that are planned and do nothing yet: using one is a mistake, because it would be silently without effect.
    pub fn not_yet(&mut self, names: &[&'static str]) {
        for name in names {
            if let Some(node) = self.fields.get(name) {
                self.known.insert(name);
                let location = node.location(self.location.field(name).path);
                self.diagnostics.mistake(&location, "is not supported yet; leave it out");
            }
        }
    }

    /// Reports every field that nobody asked for.
    pub fn finish(self) {
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

/// What to say of an unknown name: `what` ("unknown field"), and its nearest match.
pub fn unknown<'n>(what: &str, name: &str, known: impl Iterator<Item = &'n str>) -> String {
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
