//! The configuration as a tree in which each value knows where it stands, and the reader of its sections.
//!
//! A file becomes a tree of [`Node`]s with line numbers; `ONCEGATE_*` variables are laid over it and keep their
//! own name as their place. A [`Section`] hands out typed values by field name. It never stops at a mistake: it
//! notes it in the shared [`Notes`] and answers as if the field were absent, so that one run shows all mistakes.
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
pub struct Place {
    /// `route[2].fingerprint.ignore[0]`; empty for the file as a whole.
    pub path: String,
    /// Line in the file, from 1; `None` where the value is not in the file.
    pub line: Option<usize>,
    /// The environment variable that gave the value.
    pub variable: Option<String>,
}

impl Place {
    /// The place of a field that stands nowhere.
    #[must_use]
    pub fn absent(path: &str) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// The place of a field of the thing at this place.
    #[must_use]
    pub fn field(&self, name: &str) -> Self {
        let path = if self.path.is_empty() { name.to_owned() } else { format!("{self}.{name}") };
        Self { path, ..self.clone() }
    }
}

/// The path alone.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}

/// A value with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed<T> {
    /// The value.
    pub value: T,
    /// Where it stands.
    pub place: Place,
}

/// A sentence about a place: what is wrong with it or unsafe about it, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Where.
    pub place: Place,
    /// What.
    pub text: String,
}

/// Mistakes and warnings, collected by everything that reads.
#[derive(Debug, Default)]
pub struct Notes {
    mistakes: RefCell<Vec<Note>>,
    warnings: RefCell<Vec<Note>>,
    asked: RefCell<BTreeSet<String>>,
}

impl Notes {
    /// Notes a mistake.
    pub fn mistake(&self, place: &Place, text: impl Into<String>) {
        self.mistakes.borrow_mut().push(Note { place: place.clone(), text: text.into() });
    }

    /// Notes that a field is missing, unless it is there and its mistake is noted already.
    pub fn missing(&self, place: &Place) {
        if !self.has_mistake_under(place) {
            self.mistake(place, "is missing");
        }
    }

    /// Whether a mistake is noted at this place or within it.
    #[must_use]
    pub fn has_mistake_under(&self, place: &Place) -> bool {
        self.mistakes.borrow().iter().any(|note| note.place.path.starts_with(&place.path))
    }

    /// Notes something that may stand but should be known.
    pub fn warning(&self, place: &Place, text: impl Into<String>) {
        self.warnings.borrow_mut().push(Note { place: place.clone(), text: text.into() });
    }

    /// All mistakes in the order of their places, and all warnings.
    #[must_use]
    pub fn into_parts(self) -> (Vec<Note>, Vec<Note>) {
        let mut mistakes: Vec<Note> = Vec::new();
        for note in self.mistakes.into_inner() {
            // A mistake in [policy] is found again for each route.
            if !mistakes.contains(&note) {
                mistakes.push(note);
            }
        }
        mistakes.sort_by_key(|note| note.place.line.unwrap_or(usize::MAX));
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

/// The tree of a TOML text; the first error of its syntax is noted.
#[must_use]
pub fn parse(text: &str, notes: &Notes) -> Node {
    let (document, errors) = DeTable::parse_recoverable(text);
    // The first only: what the parser meets after it is mostly the same mistake again.
    let start = |error: &&toml::de::Error| error.span().map_or(0, |span| span.start);
    if let Some(error) = errors.iter().min_by_key(start) {
        let line = error.span().map(|span| line_of(text, span.start));
        notes
            .mistake(&Place { line, ..Place::default() }, format!("not TOML: {}", error.message()));
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
        notes: &Notes,
    ) {
        let mut node = from_variable(value, variable, notes);
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

    fn place(&self, path: String) -> Place {
        Place { path, line: self.line, variable: self.variable.clone() }
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

fn from_variable(value: &str, variable: &str, notes: &Notes) -> Node {
    let text = Node { value: Value::Text(value.to_owned()), line: None, variable: None };
    if !value.starts_with(['{', '[']) {
        return text;
    }
    match DeValue::parse(value) {
        Ok(parsed) => from_value(parsed.get_ref(), value, 0),
        Err(error) => {
            let variable = Some(variable.to_owned());
            let place = Place { variable, ..Place::default() };
            notes.mistake(&place, format!("not a TOML value: {}", error.message()));
            text
        }
    }
}

/// A field that may be either.
pub enum WordOrSection<'a> {
    /// A text.
    Word(Placed<String>),
    /// A table.
    Section(Section<'a>),
}

/// One table of the tree, read field by field.
pub struct Section<'a> {
    fields: BTreeMap<&'a str, &'a Node>,
    known: BTreeSet<&'static str>,
    place: Place,
    notes: &'a Notes,
}

impl<'a> Section<'a> {
    /// The top level.
    #[must_use]
    pub fn top(tree: &'a Node, notes: &'a Notes) -> Self {
        Self::of(tree, Place::default(), notes)
    }

    fn of(node: &'a Node, place: Place, notes: &'a Notes) -> Self {
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
                notes.mistake(&place, format!("this is {}, it must be a table", node.value.kind()));
                BTreeMap::new()
            }
        };
        Self { fields, known: BTreeSet::new(), place, notes }
    }

    /// Where this section stands.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
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

    fn ask(&mut self, name: &'static str) -> Option<Placed<&'a Node>> {
        self.known.insert(name);
        let path = self.place.field(name).path;
        self.notes.asked.borrow_mut().insert(without_indices(&path));
        let node = *self.fields.get(name)?;
        Some(Placed { value: node, place: node.place(path) })
    }

    /// A field read by `read`, which says what is wrong with it.
    pub fn read<T>(
        &mut self,
        name: &'static str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Option<Placed<T>> {
        let text = self.text(name)?;
        match read(&text.value) {
            Ok(value) => Some(Placed { value, place: text.place }),
            Err(wrong) => {
                self.notes.mistake(&text.place, wrong);
                None
            }
        }
    }

    /// A text.
    pub fn text(&mut self, name: &'static str) -> Option<Placed<String>> {
        let node = self.ask(name)?;
        self.text_of(&node)
    }

    fn text_of(&self, node: &Placed<&Node>) -> Option<Placed<String>> {
        if let Value::Text(text) = &node.value.value {
            return Some(Placed { value: text.clone(), place: node.place.clone() });
        }
        self.wrong_kind(node, "a text in quotes");
        None
    }

    /// A duration: `"10s"`, `"24h"`, `"500ms"`.
    pub fn duration(&mut self, name: &'static str) -> Option<Placed<Duration>> {
        const HOW: &str = "write a duration with its unit, such as \"500ms\", \"10s\" or \"24h\"";
        let node = self.ask(name)?;
        let Value::Text(text) = &node.value.value else {
            self.notes.mistake(&node.place, format!("this is {}; {HOW}", node.value.value.kind()));
            return None;
        };
        match humantime::parse_duration(text) {
            Ok(value) => self.no_longer_than_a_century(Placed { value, place: node.place }),
            Err(_) => {
                self.notes.mistake(&node.place, format!("{text:?} is not a duration; {HOW}"));
                None
            }
        }
    }

    /// Beyond that, times that a duration is added to could not be written any more.
    fn no_longer_than_a_century(&mut self, read: Placed<Duration>) -> Option<Placed<Duration>> {
        if read.value <= CENTURY {
            return Some(read);
        }
        self.notes.mistake(&read.place, "must be 100 years at most".to_owned());
        None
    }

    /// A duration, or `word` for none.
    pub fn duration_or(
        &mut self,
        name: &'static str,
        word: &str,
    ) -> Option<Placed<Option<Duration>>> {
        let node = self.ask(name)?;
        let read = |text: &str| match text == word {
            true => Some(None),
            false => humantime::parse_duration(text).ok().map(Some),
        };
        let text = if let Value::Text(text) = &node.value.value { text } else { "" };
        let Some(value) = read(text) else {
            let text = format!("must be {word:?}, or a duration with its unit such as \"500ms\"");
            self.notes.mistake(&node.place, text);
            return None;
        };
        let Some(value) = value else { return Some(Placed { value: None, place: node.place }) };
        let Placed { value, place } =
            self.no_longer_than_a_century(Placed { value, place: node.place })?;
        Some(Placed { value: Some(value), place })
    }

    /// A size: `"1MiB"`, or an integer of bytes.
    pub fn size(&mut self, name: &'static str) -> Option<Placed<usize>> {
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
            Some(value) => Some(Placed { value, place: node.place }),
            None => {
                self.notes.mistake(&node.place, format!("not a size; {HOW}"));
                None
            }
        }
    }

    /// A whole number within a range.
    pub fn number(
        &mut self,
        name: &'static str,
        range: std::ops::RangeInclusive<u32>,
    ) -> Option<Placed<u32>> {
        let node = self.ask(name)?;
        let number = match &node.value.value {
            Value::Integer(number) => *number,
            Value::Text(text) if node.place.variable.is_some() => text.parse().ok(),
            Value::Text(_)
            | Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_) => None,
        };
        let fitting = number.and_then(|n| u32::try_from(n).ok()).filter(|n| range.contains(n));
        if let Some(value) = fitting {
            return Some(Placed { value, place: node.place });
        }
        let (low, high) = (range.start(), range.end());
        self.notes.mistake(&node.place, format!("must be a whole number from {low} to {high}"));
        None
    }

    /// `true` or `false`.
    pub fn flag(&mut self, name: &'static str) -> Option<Placed<bool>> {
        let node = self.ask(name)?;
        let flag = match &node.value.value {
            Value::Boolean(flag) => Some(*flag),
            Value::Text(text) if node.place.variable.is_some() => text.parse().ok(),
            Value::Text(_)
            | Value::Integer(_)
            | Value::Float(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_) => None,
        };
        if let Some(value) = flag {
            return Some(Placed { value, place: node.place });
        }
        self.wrong_kind(&node, "true or false, without quotes");
        None
    }

    /// A list of texts.
    pub fn texts(&mut self, name: &'static str) -> Option<Placed<Vec<Placed<String>>>> {
        self.list(name, "a list of texts", |section, item| section.text_of(item))
    }

    /// One text, or a list of them.
    pub fn text_or_texts(&mut self, name: &'static str) -> Option<Placed<Vec<Placed<String>>>> {
        let node = self.ask(name)?;
        if let Value::Text(text) = &node.value.value {
            let one = Placed { value: text.clone(), place: node.place.clone() };
            return Some(Placed { value: vec![one], place: node.place });
        }
        self.texts(name)
    }

    /// A word, or a table with more to say.
    pub fn word_or_section(&mut self, name: &'static str) -> Option<WordOrSection<'a>> {
        let node = self.ask(name)?;
        Some(Self::word_or_table(node.value, node.place, self.notes))
    }

    fn word_or_table(node: &'a Node, place: Place, notes: &'a Notes) -> WordOrSection<'a> {
        match &node.value {
            Value::Text(text) => WordOrSection::Word(Placed { value: text.clone(), place }),
            Value::Integer(_)
            | Value::Float(_)
            | Value::Boolean(_)
            | Value::Datetime(_)
            | Value::Array(_)
            | Value::Table(_) => WordOrSection::Section(Self::of(node, place, notes)),
        }
    }

    /// The fields of a table whose names are free, each a word or a table: `headers = { NAME = "..." }`.
    pub fn named_words_or_sections(
        &mut self,
        name: &'static str,
    ) -> Vec<(String, WordOrSection<'a>)> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let outer = Self::of(node.value, node.place, self.notes);
        let read = |(name, field): (&&'a str, &&'a Node)| {
            let place = field.place(outer.place.field(name).path);
            ((*name).to_owned(), Self::word_or_table(field, place, self.notes))
        };
        outer.fields.iter().map(read).collect()
    }

    /// A field that means nothing so far: using it is a mistake, and this is why.
    pub fn refused(&mut self, name: &'static str, why: &str) {
        if let Some(node) = self.fields.get(name) {
            self.known.insert(name);
            let place = node.place(self.place.field(name).path);
            self.notes.mistake(&place, why);
        }
    }

    /// A list of texts or integers, as texts.
    pub fn codes(&mut self, name: &'static str) -> Option<Placed<Vec<Placed<String>>>> {
        self.list(name, "a list of statuses", |section, item| match &item.value.value {
            Value::Integer(Some(number)) => {
                Some(Placed { value: number.to_string(), place: item.place.clone() })
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
        read: impl Fn(&Self, &Placed<&Node>) -> Option<T>,
    ) -> Option<Placed<Vec<T>>> {
        let node = self.ask(name)?;
        let Value::Array(items) = &node.value.value else {
            self.wrong_kind(&node, must);
            return None;
        };
        let placed = items.iter().enumerate().map(|(index, item)| Placed {
            value: item,
            place: item.place(format!("{}[{index}]", node.place)),
        });
        let value = placed.filter_map(|item| read(self, &item)).collect();
        Some(Placed { value, place: node.place })
    }

    /// Any value, as JSON.
    pub fn any(&mut self, name: &'static str) -> Option<Placed<serde_json::Value>> {
        let node = self.ask(name)?;
        Some(Placed { value: node.value.to_json(), place: node.place })
    }

    /// A table within this one.
    pub fn section(&mut self, name: &'static str) -> Option<Self> {
        let node = self.ask(name)?;
        Some(Self::of(node.value, node.place, self.notes))
    }

    /// A list of tables: `[[route]]`.
    pub fn sections(&mut self, name: &'static str) -> Vec<Self> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let Value::Array(items) = &node.value.value else {
            self.wrong_kind(&node, &format!("a list of tables: write [[{}]]", node.place));
            return Vec::new();
        };
        let read = |(index, item): (usize, &'a Node)| {
            Self::of(item, item.place(format!("{}[{index}]", node.place)), self.notes)
        };
        items.iter().enumerate().map(read).collect()
    }

    /// The tables of a table whose names are free: `[upstreams.NAME]`.
    pub fn named_sections(&mut self, name: &'static str) -> Vec<(String, Self)> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let outer = Self::of(node.value, node.place, self.notes);
        let read = |(name, field): (&&'a str, &&'a Node)| {
            let place = field.place(outer.place.field(name).path);
            ((*name).to_owned(), Self::of(field, place, self.notes))
        };
        outer.fields.iter().map(read).collect()
    }

    /// The texts of a table whose names are free: `xml_namespaces = { p = "..." }`.
    pub fn named_texts(&mut self, name: &'static str) -> Vec<(String, Placed<String>)> {
        let Some(node) = self.ask(name) else { return Vec::new() };
        let outer = Self::of(node.value, node.place, self.notes);
        let read = |(name, field): (&&'a str, &&'a Node)| {
            let place = field.place(outer.place.field(name).path);
            let text = outer.text_of(&Placed { value: *field, place })?;
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
        self.notes.mistake(&text.place, wrong);
    }

    /// Fields that are planned and do nothing yet: using one is a mistake, because it would be silently without effect.
    pub fn not_yet(&mut self, names: &[&'static str]) {
        for name in names {
            if let Some(node) = self.fields.get(name) {
                self.known.insert(name);
                let place = node.place(self.place.field(name).path);
                self.notes.mistake(&place, "is not supported yet; leave it out");
            }
        }
    }

    /// Reports every field that nobody asked for.
    pub fn finish(self) {
        for (name, node) in &self.fields {
            if self.known.contains(name) {
                continue;
            }
            let place = node.place(self.place.field(name).path);
            self.notes.mistake(&place, unknown("unknown field", name, self.known.iter().copied()));
        }
    }

    fn wrong_kind(&self, node: &Placed<&Node>, must: &str) {
        let is = node.value.value.kind();
        self.notes.mistake(&node.place, format!("this is {is}, it must be {must}"));
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
