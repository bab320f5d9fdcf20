//! `oncegate explain`: shows how the gateway reads a request, and how two requests differ.
//!
//! It reads the configuration, and the database only if a record is named. It changes nothing and needs no running `serve`. It
//! prints the canonical form, so its output holds the content of the body.

use std::io::Write;

use bytes::Bytes;
use clap::Args;

use super::print::{self, Exit, Failure, Out, block, escape, refuse};
use super::records::body_of;
use crate::admin::explain::{
    ExplainError, ExplainQuery, ExplainResponse, RecordComparison, RequestText, answer,
};
use crate::explain::{CanonicalView, Compared, Disposition, Explain, Explained};
use crate::record::RecordId;
use crate::route::{Named, Reading};
use crate::store::Store;

/// How much of a canonical body is printed, in characters; `--json` shows more.
const BODY_SHOWN: usize = 4096;

/// `oncegate explain …`
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// The request's method
    #[arg(long, default_value = "POST")]
    pub method: String,
    /// Its path and query
    #[arg(long)]
    pub path: String,
    /// One of its headers, 'Name: value'; may be repeated
    #[arg(long = "header", value_name = "HEADER")]
    pub headers: Vec<String>,
    /// Its body: text, or @FILE
    #[arg(long)]
    pub body: Option<String>,
    /// The method of another request to compare with; its other parts default to the first request's
    #[arg(long, value_name = "METHOD")]
    pub other_method: Option<String>,
    /// The other request's path and query
    #[arg(long, value_name = "PATH")]
    pub other_path: Option<String>,
    /// A header of the other request, in place of the first one's of that name; may be repeated
    #[arg(long = "other-header", value_name = "HEADER")]
    pub other_headers: Vec<String>,
    /// The other request's body: text, or @FILE
    #[arg(long, value_name = "BODY")]
    pub other_body: Option<String>,
    /// A record to compare with
    #[arg(long, value_name = "ID", value_parser = print::id::<RecordId>)]
    pub record: Option<RecordId>,
}

impl ExplainArgs {
    fn asked(&self) -> Result<ExplainQuery, Failure> {
        let first = RequestText {
            method: Some(self.method.clone()),
            path: Some(self.path.clone()),
            headers: headers("--header", &self.headers)?,
            body: body("--body", self.body.as_deref())?,
        };
        let other = RequestText {
            method: self.other_method.clone(),
            path: self.other_path.clone(),
            headers: headers("--other-header", &self.other_headers)?,
            body: body("--other-body", self.other_body.as_deref())?,
        };
        let named = other.method.is_some()
            || other.path.is_some()
            || !other.headers.is_empty()
            || other.body.is_some();
        ExplainQuery::new(first, named.then_some(other), self.record).map_err(Failure::Usage)
    }
}

fn headers(flag: &str, lines: &[String]) -> Result<Vec<(String, String)>, Failure> {
    let read = |line: &String| {
        let wrong =
            || Failure::Usage(format!("{flag} '{}': write it as 'Name: value'", escape(line)));
        let (name, value) = line.split_once(':').ok_or_else(wrong)?;
        Ok((name.to_owned(), value.to_owned()))
    };
    lines.iter().map(read).collect()
}

fn body(flag: &str, text: Option<&str>) -> Result<Option<Bytes>, Failure> {
    text.map(|text| body_of(flag, text)).transpose()
}

/// Explains the request. Needs the store only if a record is named.
///
/// # Errors
/// [`Failure::Usage`] if the arguments are no request; an error of the store or of the output.
pub async fn run(
    args: &ExplainArgs,
    by: &dyn Explain,
    store: Option<&dyn Store>,
    out: &mut Out<'_>,
) -> Result<Exit, Failure> {
    let answer = match answer(by, store, args.asked()?).await {
        Ok(answer) => answer,
        Err(ExplainError::NoRecord(id)) => {
            return refuse(out, "not_found", &format!("There is no record {id}."));
        }
        Err(ExplainError::Store(error)) => return Err(error.into()),
    };
    if out.json {
        return out.document(&answer);
    }
    print_answer(out, &answer)?;
    Ok(Exit::Done)
}

fn print_answer(out: &mut dyn Write, answer: &ExplainResponse) -> std::io::Result<()> {
    print_explained(out, &answer.request)?;
    if let Some(other) = &answer.other {
        writeln!(out, "\nThe other request")?;
        print_explained(out, other)?;
        writeln!(out, "\nCompared")?;
        match &answer.compared {
            Some(compared) => print_compared(out, compared)?,
            None => writeln!(out, "  They cannot be compared: not both have a key and a hash.")?,
        }
    }
    if let Some(record) = &answer.record {
        print_record(out, record)?;
    }
    Ok(())
}

fn print_explained(out: &mut dyn Write, explained: &Explained) -> std::io::Result<()> {
    let becomes = match explained.becomes {
        Disposition::Protected => "Protected",
        Disposition::Observed => "Observed",
        Disposition::PassesWithoutRoute | Disposition::PassesWithoutKey => "Passes through",
        Disposition::Refused => "Refused",
    };
    writeln!(out, "{becomes}. {}", escape(&explained.why))?;
    print_reading(out, "split, decoded", &explained.look.split)?;
    print_reading(out, "decoded, split", &explained.look.decoded)?;
    for near in &explained.look.near {
        let (route, why) = (route(&near.route), escape(&near.why_not));
        line(out, "not", &format!("{route}: {why}"))?;
    }
    if let Some(scope) = &explained.scope {
        line(out, "tenant", &escape(&scope.tenant_id))?;
        line(out, "operation", &escape(&scope.operation))?;
        let derived = if scope.derived { " (made of the request)" } else { "" };
        line(out, "key", &format!("{}{derived}", escape(&scope.key)))?;
    }
    if let Some(hash) = &explained.hash {
        line(out, "hash", &hash.canonical)?;
        line(out, "as received", &hash.raw)?;
        line(out, "recipe", &hash.recipe)?;
    }
    if let Some(problem) = &explained.problem {
        let name = problem.get("type").and_then(|text| text.as_str()).unwrap_or_default();
        let status = problem.get("status").map(ToString::to_string).unwrap_or_default();
        line(out, "answer", &format!("{status} {}", escape(name)))?;
    }
    explained.canonical.as_ref().map_or(Ok(()), |canonical| print_canonical(out, canonical))
}

fn line(out: &mut dyn Write, name: &str, value: &str) -> std::io::Result<()> {
    writeln!(out, "  {name:<15} {value}")
}

fn route(route: &Named) -> String {
    let Named { operation, methods, path } = route;
    escape(&format!("{operation} ({} {path})", methods.join(", ")))
}

fn print_reading(out: &mut dyn Write, name: &str, reading: &Reading) -> std::io::Result<()> {
    let found = reading.route.as_ref().map_or_else(|| "no route".to_owned(), route);
    line(out, name, &format!("{} -> {found}", escape(&reading.path)))
}

fn print_canonical(out: &mut dyn Write, canonical: &CanonicalView) -> std::io::Result<()> {
    let CanonicalView { method, path, content_type, body_form, body_bytes, .. } = canonical;
    writeln!(out, "\n  What counts")?;
    line(out, "method, path", &escape(&format!("{method} {path}")))?;
    for (name, value) in &canonical.query {
        line(out, "query", &escape(&format!("{name} = {value}")))?;
    }
    line(out, "content-type", &escape(content_type))?;
    for (name, value) in &canonical.headers {
        line(out, "header", &escape(&format!("{name}: {value}")))?;
    }
    let coded = if canonical.body_is_base64 { ", in base64" } else { "" };
    line(out, "body", &format!("{body_bytes} bytes as {body_form}{coded}"))?;
    if !canonical.body.is_empty() {
        let shown: String = canonical.body.chars().take(BODY_SHOWN).collect();
        let more = shown.len() < canonical.body.len();
        block(out, &shown, "    ")?;
        if more {
            writeln!(out, "    ... --json shows more")?;
        }
    }
    Ok(())
}

fn print_compared(out: &mut dyn Write, compared: &Compared) -> std::io::Result<()> {
    writeln!(out, "  {}", escape(&compared.verdict))?;
    let same = |same: bool| if same { "the same" } else { "differ" };
    line(out, "hashes", same(compared.same_canonical))?;
    line(out, "as received", same(compared.same_raw))?;
    line(out, "recipes", same(compared.same_recipe))?;
    if let Some(difference) = &compared.difference {
        let side = |side: &Option<String>| {
            side.as_ref().map_or_else(|| "nothing".to_owned(), |text| escape(text))
        };
        line(out, "first differ at", &escape(&difference.place))?;
        line(out, "the first", &side(&difference.first))?;
        line(out, "the other", &side(&difference.second))?;
    }
    Ok(())
}

fn print_record(out: &mut dyn Write, record: &RecordComparison) -> std::io::Result<()> {
    writeln!(out, "\nRecord {}, {} since {}", record.id, record.status, record.created_at)?;
    line(out, "tenant", &escape(&record.tenant_id))?;
    line(out, "operation", &escape(&record.operation))?;
    line(out, "key", &escape(&record.key))?;
    line(out, "hash", &record.request_hash)?;
    match &record.compared {
        Some(compared) => print_compared(out, compared),
        None => writeln!(out, "  The request has no key or no hash: there is nothing to compare."),
    }
}
