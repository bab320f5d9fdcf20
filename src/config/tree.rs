//! The configuration as a tree of values with their locations.
//!
//! A file becomes a tree of [`Node`]s with line numbers. `ONCEGATE_*` variables replace values of the file; the location of
//! such a value is the name of its variable.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

use crate::config::diagnostics::{Diagnostics, Location};

/// A value of the tree.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    line: Option<usize>,
    variable: Option<String>,
}

/// The content of a node.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Text(String),
    Integer(Option<i64>),
    Float(f64),
    Boolean(bool),
    Datetime(String),
    Array(Vec<Node>),
    Table(BTreeMap<String, Node>),
}

impl Value {
    /// The name of the type, for messages.
    pub(super) fn kind(&self) -> &'static str {
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

/// The tree of a TOML text. Reports the first syntax error.
#[must_use]
pub(super) fn parse(text: &str, diagnostics: &Diagnostics) -> Node {
    let (document, errors) = DeTable::parse_recoverable(text);
    // Only the first, because later errors are mostly the same mistake again.
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
            // The location of a section is the location of its name.
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
    /// An empty tree.
    #[must_use]
    pub(super) fn empty() -> Self {
        Self { value: Value::Table(BTreeMap::new()), line: None, variable: None }
    }

    /// Replaces `section.field` by the value of a variable. A value that begins with `{` or `[` is TOML.
    pub(super) fn overlay(
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

    pub(super) fn location(&self, path: String) -> Location {
        Location { path, line: self.line, variable: self.variable.clone() }
    }

    pub(super) fn to_json(&self) -> serde_json::Value {
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
