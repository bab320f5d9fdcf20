//! Expressions and templates: compiled once, bounded in what they do, and strict about what is not there.
//!
//! Templates come from the operator, values from callers and the upstream. No template can load another one; output is bounded,
//! and whatever goes wrong is an error text, never a panic.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::io;
use std::sync::{Arc, LazyLock};

use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, UndefinedBehavior};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::ordered;

/// Longest text that one template may write, in bytes.
const TEXT_MAX: usize = 1024 * 1024;
/// What an expression may name.
const ROOTS: [&str; 6] = ["request", "response", "tenant", "operation", "key", "record"];
/// What stands for itself in a path or a query (RFC 3986, 2.3); everything else is encoded.
const PIECE: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// What is known of a request.
const REQUEST: [&str; 7] = ["method", "path", "query", "headers", "params", "json", "form"];

static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(environment);

/// As the other, and what has no order is not compared.
static STRICT: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut strict = environment();
    ordered::make_strict(&mut strict);
    strict
});

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_recursion_limit(100);
    environment
}

/// Writes a value as one piece of a path or a query: nothing in it ends the piece, and it is never empty.
fn write_piece(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let plain = matches!(value.kind(), ValueKind::String | ValueKind::Number | ValueKind::Bool);
    let text = if plain { value.to_string() } else { String::new() };
    if text.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "nothing to put into a path"));
    }
    write!(out, "{}", utf8_percent_encode(&text, PIECE)).map_err(Error::from)
}

#[derive(Debug)]
pub(in crate::record) struct Expression {
    source: String,
    compiled: minijinja::Expression<'static, 'static>,
}

impl Expression {
    fn value(&self, variables: &Value) -> Result<Value, String> {
        let value = self.compiled.eval(variables.clone());
        let value = value.map_err(|error| failed(&self.source, &error))?;
        if value.is_undefined() {
            return Err(format!("{}: there is no such value", self.source));
        }
        Ok(value)
    }

    pub(in crate::record) fn is_true(&self, variables: &Value) -> Result<bool, String> {
        self.value(variables).map(|value| value.is_true())
    }

    /// Its value, which must be true or false.
    pub(in crate::record) fn verdict(&self, variables: &Value) -> Result<bool, String> {
        let value = self.value(variables)?;
        bool::try_from(value.clone())
            .ok()
            .filter(|_| value.kind() == ValueKind::Bool)
            .ok_or_else(|| format!("{}: it is neither true nor false", self.source))
    }

    pub(in crate::record) fn elements(
        &self,
        variables: &Value,
        max: usize,
    ) -> Result<Vec<Value>, String> {
        let value = self.value(variables)?;
        if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
            return Err(format!("{}: it is not a list", self.source));
        }
        let items = value.try_iter().map_err(|error| failed(&self.source, &error))?;
        let items = items.take(max + 1).collect::<Vec<_>>();
        if items.len() > max {
            return Err(format!("{}: the list is too long", self.source));
        }
        Ok(items)
    }

    /// Its value as JSON. One that surely takes more than `max` bytes is not built: it may be as long as an answer, once for
    /// each element of a list.
    fn json(&self, variables: &Value, max: usize) -> Result<serde_json::Value, String> {
        let value = self.value(variables)?;
        if exceeds(&value, &mut { max }) {
            return Err(format!("{}: its value is too large", self.source));
        }
        serde_json::to_value(&value).map_err(|error| format!("{}: {error}", self.source))
    }
}

/// An error without the values it met: they may be secrets.
fn failed(source: &str, error: &minijinja::Error) -> String {
    format!("{source}: {}", error.kind())
}

/// A text with expressions in it.
#[derive(Debug)]
pub(in crate::record) enum Text {
    Fixed(String),
    Template { source: String, environment: Arc<Environment<'static>> },
}

impl Text {
    pub(in crate::record) fn render(&self, variables: &Value) -> Result<String, String> {
        let (source, environment) = match self {
            Self::Fixed(text) => return Ok(text.clone()),
            Self::Template { source, environment } => (source, environment),
        };
        let mut output = Bounded(Vec::new());
        let template = environment.get_template("").map_err(|error| failed(source, &error))?;
        template
            .render_captured_to(variables.clone(), &mut output)
            .map_err(|error| failed(source, &error))?;
        String::from_utf8(output.0).map_err(|error| error.to_string())
    }
}

struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > TEXT_MAX {
            return Err(io::Error::other("the text is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a value surely takes more than `left` bytes as JSON. No more of it is looked at than as many bytes hold.
fn exceeds(value: &Value, left: &mut usize) -> bool {
    let least = value.as_str().map_or(1, str::len);
    let Some(rest) = left.checked_sub(least) else { return true };
    *left = rest;
    let is_map = value.kind() == ValueKind::Map;
    // What is neither has no parts, or gives them once.
    if !is_map && value.kind() != ValueKind::Seq {
        return false;
    }
    value.try_iter().into_iter().flatten().any(|item| {
        let member = if is_map { value.get_item(&item).ok() } else { None };
        exceeds(&item, left) || member.is_some_and(|member| exceeds(&member, left))
    })
}

#[derive(Debug)]
pub(in crate::record) enum Leaf {
    Value(serde_json::Value),
    Expression(Expression),
    Text(Text),
}

/// A payload.
#[derive(Debug)]
pub(in crate::record) enum Tree {
    Leaf(Leaf),
    List(Vec<Self>),
    Members(Vec<(String, Self)>),
}

impl Tree {
    /// With values of at most `max` bytes each.
    pub(in crate::record) fn render(
        &self,
        variables: &Value,
        max: usize,
    ) -> Result<serde_json::Value, String> {
        match self {
            Self::Leaf(Leaf::Value(value)) => Ok(value.clone()),
            Self::Leaf(Leaf::Expression(expression)) => expression.json(variables, max),
            Self::Leaf(Leaf::Text(text)) => text.render(variables).map(Into::into),
            Self::List(items) => items.iter().map(|item| item.render(variables, max)).collect(),
            Self::Members(members) => members
                .iter()
                .map(|(name, member)| Ok((name.clone(), member.render(variables, max)?)))
                .collect(),
        }
    }
}

/// The variables of one element: those of the record, `item` and `index`.
pub(in crate::record) fn with_element(variables: &Value, item: Value, index: usize) -> Value {
    let index = Value::from(index);
    minijinja::context! { item, index, ..variables.clone() }
}

/// A field that cannot be used, and why.
#[derive(Debug)]
pub(in crate::record) struct Wrong {
    /// Of which event; empty: of none.
    pub(in crate::record) event: String,
    pub(in crate::record) field: String,
    text: String,
    error: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.event.is_empty() {
            write!(f, "event {:?}: ", self.event)?;
        }
        write!(f, "{} {:?}: {}", self.field, self.text, self.error)
    }
}

/// Compiles a route's templates, and collects what they name of the request and what is wrong with them.
#[derive(Debug, Default)]
pub(in crate::record) struct Compiler {
    /// The event that is compiled now.
    pub(in crate::record) event: String,
    /// Whether `item` and `index` are known.
    pub(in crate::record) in_element: bool,
    /// There is no `response` yet.
    pub(in crate::record) before_answer: bool,
    pub(in crate::record) needs: BTreeSet<String>,
    /// All dotted names so far.
    pub(in crate::record) named: BTreeSet<String>,
    pub(in crate::record) errors: Vec<Wrong>,
}

impl Compiler {
    pub(in crate::record) fn wrong(&mut self, field: &str, text: &str, error: &str) {
        self.errors.push(Wrong {
            event: self.event.clone(),
            field: field.to_owned(),
            text: text.to_owned(),
            error: error.to_owned(),
        });
    }

    pub(in crate::record) fn expression(
        &mut self,
        field: &str,
        source: Option<&str>,
    ) -> Option<Expression> {
        let source = source?;
        match ENVIRONMENT.compile_expression_owned(source.to_owned()) {
            Ok(compiled) => {
                self.names(field, source, compiled.undeclared_variables(true));
                Some(Expression { source: source.to_owned(), compiled })
            }
            Err(error) => {
                self.wrong(field, source, &error.to_string());
                None
            }
        }
    }

    /// An expression that decides: only numbers with numbers and texts with texts are compared in order.
    pub(in crate::record) fn decision(&mut self, field: &str, source: &str) -> Option<Expression> {
        // First as it stands: its names are checked, and errors show what is written.
        self.expression(field, Some(source))?;
        let compiled = ordered::as_tests(source).map_err(str::to_owned).and_then(|strict| {
            STRICT.compile_expression_owned(strict).map_err(|error| error.to_string())
        });
        match compiled {
            Ok(compiled) => Some(Expression { source: source.to_owned(), compiled }),
            Err(error) => {
                self.wrong(field, source, &error);
                None
            }
        }
    }

    pub(in crate::record) fn text(&mut self, field: &str, source: Option<&str>) -> Option<Text> {
        self.text_in(environment(), field, source?)
    }

    /// Path and query, in which each value is one piece.
    pub(in crate::record) fn path(&mut self, field: &str, source: &str) -> Option<Text> {
        if !source.starts_with('/') || source.contains('#') {
            self.wrong(field, source, "it must begin with a slash, and hold no '#'");
            return None;
        }
        let mut environment = environment();
        environment.set_formatter(write_piece);
        self.text_in(environment, field, source)
    }

    fn text_in(
        &mut self,
        mut environment: Environment<'static>,
        field: &str,
        source: &str,
    ) -> Option<Text> {
        if !["{{", "{%", "{#"].iter().any(|mark| source.contains(mark)) {
            return Some(Text::Fixed(source.to_owned()));
        }
        if let Err(error) = environment.add_template_owned("", source.to_owned()) {
            self.wrong(field, source, &error.to_string());
            return None;
        }
        let names = environment.get_template("").map(|known| known.undeclared_variables(true));
        self.names(field, source, names.unwrap_or_default());
        let environment = Arc::new(environment);
        Some(Text::Template { source: source.to_owned(), environment })
    }

    pub(in crate::record) fn tree(&mut self, field: &str, tree: &serde_json::Value) -> Tree {
        match tree {
            serde_json::Value::String(text) => Tree::Leaf(self.leaf(field, text)),
            serde_json::Value::Array(items) => {
                Tree::List(items.iter().map(|item| self.tree(field, item)).collect())
            }
            serde_json::Value::Object(members) => {
                let mut compiled = Vec::with_capacity(members.len());
                for (name, member) in members {
                    compiled.push((name.clone(), self.tree(&format!("{field}.{name}"), member)));
                }
                Tree::Members(compiled)
            }
            serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::Number(_) => {
                Tree::Leaf(Leaf::Value(tree.clone()))
            }
        }
    }

    fn leaf(&mut self, field: &str, text: &str) -> Leaf {
        let inner = text.strip_prefix("{{").and_then(|rest| rest.strip_suffix("}}"));
        if let Some(inner) = inner
            && ENVIRONMENT.compile_expression_owned(inner.to_owned()).is_ok()
            && let Some(expression) = self.expression(field, Some(inner.trim()))
        {
            return Leaf::Expression(expression);
        }
        let text = self.text(field, Some(text));
        text.map_or(Leaf::Value(serde_json::Value::Null), Leaf::Text)
    }

    /// Checks what is named, and keeps what is named of the request.
    fn names(&mut self, field: &str, source: &str, names: HashSet<String>) {
        let functions = ENVIRONMENT.globals().map(|(name, _)| name).collect::<HashSet<_>>();
        let mut names = names.into_iter().collect::<Vec<_>>();
        names.sort_unstable();
        for name in names {
            self.named.insert(name.clone());
            let (root, rest) = name.split_once('.').unwrap_or((&name, ""));
            let known = (ROOTS.contains(&root) && !(self.before_answer && root == "response"))
                || functions.contains(root)
                || (self.in_element && matches!(root, "item" | "index"));
            if !known {
                self.wrong(field, source, &format!("there is no {root:?}"));
            } else if root == "request" {
                let part = rest.split('.').next().unwrap_or_default();
                if rest.is_empty() {
                    self.needs.extend(REQUEST.map(str::to_owned));
                } else if REQUEST.contains(&part) {
                    self.needs.insert(rest.to_owned());
                } else {
                    self.wrong(field, source, &format!("a request has no {part:?}"));
                }
            }
        }
    }
}
