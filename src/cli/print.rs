//! The output of commands: exit status, tables, escaped text, JSON, and the name of the operator.
//!
//! Keys, tenants and bodies come from callers. Their control characters, line breaks and direction marks are printed as
//! escapes, so that no stored value can forge a line or move the cursor. With `--json` a command prints one JSON document,
//! also when it refuses.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;

use crate::admin::view::{is_unsafe_to_print, time, to_json};
use crate::record::RecordId;
use crate::store::{self, Objection, Operator};

/// Longest cell of a table, in characters.
const CELL_MAX: usize = 44;
/// Longest name of an operator that is written to the audit table, in characters.
const WHO_MAX: usize = 255;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command did its work.
    Done,
    /// The command refused, or found nothing by that name. The reason has been printed.
    Refused,
}

impl Exit {
    /// The process's exit status.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Refused => 1,
        }
    }
}

/// Why a command could not do its work. The caller prints it.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// An argument is wrong.
    #[error("{0}")]
    Usage(String),
    /// The store failed, and changed nothing.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The store failed, and may have made the change all the same, now or a moment later.
    #[error(
        "it is not known whether the change was made: see `oncegate {look}` before you repeat the command"
    )]
    InDoubt {
        /// The command that shows whether the change was made.
        look: String,
        /// Why.
        #[source]
        cause: store::Error,
    },
    /// The output could not be written.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
    /// The output could not be made.
    #[error("cannot make the output: {0}")]
    Json(#[from] serde_json::Error),
}

impl Failure {
    /// The process's exit status.
    #[must_use]
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Store(_) | Self::InDoubt { .. } | Self::Output(_) | Self::Json(_) => 1,
        }
    }
}

/// The result of a change by hand. If it is not known, the failure names the command that shows it.
pub(super) fn changed<T>(result: Result<T, store::Error>, look: &str) -> Result<T, Failure> {
    result.map_err(|cause| match cause {
        store::Error::InDoubt(_) => Failure::InDoubt { look: look.to_owned(), cause },
        store::Error::Unavailable(_)
        | store::Error::Refused(_)
        | store::Error::Unreadable(_)
        | store::Error::Late => Failure::Store(cause),
    })
}

/// Reads an id that was typed.
pub(super) fn id<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "an id is a UUID, as the lists show it".to_owned())
}

/// Where a command prints, and whether it prints JSON.
pub struct Out<'a> {
    /// The stream.
    pub to: &'a mut dyn Write,
    /// Whether to print one JSON document instead of text.
    pub json: bool,
}

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl Out<'_> {
    /// Prints the JSON document of a command that did its work.
    pub(super) fn document<T: Serialize>(&mut self, value: &T) -> Result<Exit, Failure> {
        writeln!(self.to, "{}", to_json(value)?)?;
        Ok(Exit::Done)
    }

    /// Prints one line of text of a command that did its work.
    pub(super) fn line(&mut self, line: &str) -> Result<Exit, Failure> {
        writeln!(self.to, "{line}")?;
        Ok(Exit::Done)
    }
}

/// The JSON document of a command that changed nothing.
#[derive(Serialize)]
struct Refusal<'a> {
    refused: &'static str,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    #[serde(skip_serializing_if = "Value::is_null")]
    sinks: Value,
}

/// Says that nothing was done, and why.
pub(super) fn refuse(out: &mut Out<'_>, name: &'static str, detail: &str) -> Result<Exit, Failure> {
    left_alone(out, name, detail, Value::Null)
}

/// The same for an event; `sinks` has its status for each sink.
pub(super) fn left_alone(
    out: &mut Out<'_>,
    name: &'static str,
    detail: &str,
    sinks: Value,
) -> Result<Exit, Failure> {
    refusal(out, &Refusal { refused: name, detail, owner: None, since: None, sinks })
}

fn refusal(out: &mut Out<'_>, what: &Refusal<'_>) -> Result<Exit, Failure> {
    if out.json {
        out.document(what)?
    } else {
        out.line(what.detail)?
    };
    Ok(Exit::Refused)
}

/// Says why a record was left as it is.
pub(super) fn objection(
    out: &mut Out<'_>,
    record: RecordId,
    why: &Objection,
) -> Result<Exit, Failure> {
    match why {
        Objection::NotFound => refuse(out, "not_found", &format!("There is no record {record}.")),
        Objection::Running { owner, since } => {
            let (owner, since) = (owner.to_string(), time(*since));
            let detail = format!(
                "Record {record} is being worked on by {owner} since {since}, and that process lives. \
                 Nothing was changed: wait for its outcome, or stop that process and let its lease run out."
            );
            let (owner, since) = (Some(owner), Some(since));
            let (refused, detail, sinks) = ("running", detail.as_str(), Value::Null);
            refusal(out, &Refusal { refused, detail, owner, since, sinks })
        }
        Objection::IsCompleted => {
            let detail = format!(
                "Record {record} is completed: its answer is replayed. Nothing was changed. \
                 To forget it, so that the next request executes again: `oncegate records release {record} --completed`."
            );
            refuse(out, "completed", &detail)
        }
        Objection::Moved => {
            let detail = format!(
                "Record {record} changed while you looked at it. Nothing was changed by you: \
                 look again with `oncegate records show {record}`."
            );
            refuse(out, "moved", &detail)
        }
    }
}

/// A table with a head and left-aligned columns, two blanks apart.
pub(super) struct Table<const N: usize> {
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    pub(super) fn new(head: [&str; N]) -> Self {
        Self { rows: vec![head.map(str::to_owned)] }
    }

    /// Adds a row. Its cells are escaped and cut here.
    pub(super) fn row(&mut self, cells: [&str; N]) {
        self.rows.push(cells.map(|cell| cut(&escape(cell), CELL_MAX)));
    }

    /// Prints it as a list, with a last line if there are more rows.
    pub(super) fn print_list(&self, out: &mut Out<'_>, more: bool) -> Result<Exit, Failure> {
        self.print(out, "")?;
        if more {
            return out.line("There are more: raise --limit, or narrow the list.");
        }
        Ok(Exit::Done)
    }

    /// Prints it, each line after `indent`.
    pub(super) fn print(&self, out: &mut dyn Write, indent: &str) -> io::Result<()> {
        let mut widths = [0; N];
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        for row in &self.rows {
            let mut line = indent.to_owned();
            for (cell, width) in row.iter().zip(widths) {
                // The format counts characters, as the widths do.
                line.push_str(&format!("{cell:<width$}  "));
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The text, or `-`.
pub(super) fn or_dash(text: Option<&str>) -> &str {
    text.unwrap_or("-")
}

/// Prints one line for each name and value.
pub(super) fn fields(out: &mut dyn Write, fields: &[(&str, Option<&str>)]) -> io::Result<()> {
    fields
        .iter()
        .try_for_each(|(name, value)| writeln!(out, "  {name:<13} {}", escape(or_dash(*value))))
}

/// Escapes whatever could act on a terminal.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe_to_print(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// The text, or its beginning and `…` where it has more than `max` characters.
fn cut(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    text.chars().take(max.saturating_sub(1)).chain(['…']).collect()
}

/// Text of a body over several lines: line breaks stay, everything else that is unsafe is escaped.
pub(super) fn block(out: &mut dyn Write, text: &str, indent: &str) -> io::Result<()> {
    for line in text.lines() {
        let line = format!("{indent}{}", escape(line));
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Who runs this command: `SUDO_USER`, else `USER`, else the numeric user id.
pub(super) fn operator(reason: Option<&str>) -> Operator {
    let named = |name: &str| std::env::var(name).ok().filter(|who| !who.trim().is_empty());
    let who = named("SUDO_USER").or_else(|| named("USER")).unwrap_or_else(user_id);
    Operator { who: cut(&escape(&who), WHO_MAX), why: reason.map(str::to_owned) }
}

#[cfg(target_os = "linux")]
fn user_id() -> String {
    use std::os::unix::fs::MetadataExt as _;
    // A process's directory belongs to its effective user.
    match std::fs::metadata("/proc/self") {
        Ok(own) => format!("uid {}", own.uid()),
        Err(_) => "unknown".to_owned(),
    }
}

#[cfg(not(target_os = "linux"))]
fn user_id() -> String {
    "unknown".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_escaped_and_cut() {
        let mut table = Table::new(["KEY", "STATUS", "NOTE"]);
        table.row(["k-1", "completed", ""]);
        table.row(["a\r\nb\u{1b}[2J\u{9b}\u{202e}", "unknown", "é"]);
        table.row([&"x".repeat(45), "in_progress", "y"]);
        let mut out = Vec::new();
        table.print(&mut out, "  ").unwrap();
        let wanted = [
            "  KEY                                           STATUS       NOTE",
            "  k-1                                           completed",
            "  a\\r\\nb\\u{1b}[2J\\u{9b}\\u{202e}                 unknown      é",
            "  xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…  in_progress  y",
            "",
        ];
        assert_eq!(String::from_utf8(out).unwrap(), wanted.join("\n"));
    }

    #[test]
    fn a_cell_of_exactly_the_width_is_not_cut() {
        assert_eq!(cut(&"é".repeat(44), 44), "é".repeat(44));
        assert_eq!(cut("abc", 2), "a…");
    }

    #[test]
    fn an_operator_always_has_a_name() {
        assert!(!operator(Some("checked by hand")).who.is_empty());
        assert_ne!(user_id(), "");
    }
}
