//! XML: canonical XML without comments and without blanks between elements.
//!
//! These do not count: encoding, declaration, order and quotes of attributes, blanks within tags, `<a/>` or `<a></a>`, CDATA
//! sections, references, line ends, comments, and namespace declarations that repeat a declaration in scope. Prefixes count,
//! because text may refer to a prefix (`xsi:type="p:order"`). Processing instructions count.
//!
//! **Blanks** are left out in an element that holds only elements and blanks. They count under `xml:space="preserve"`, in an
//! element that holds only text, and among words. A comment within a text splits it, because some parsers take only the part
//! before it.
//!
//! The canonical form is XML in UTF-8, and its own canonical form. So two documents have the same form only if they are
//! the same document. A text is compared byte by byte if it is not well-formed, has a document type, nests deeper than
//! [`DEPTH_MAX`](super::json::DEPTH_MAX), or may be decoded in two ways.
//!
//! Time is linear except for the sorting of attributes. Each path of the settings adds a fixed cost for each element.

mod decode;
mod namespaces;
mod path;
mod read;

pub use namespaces::{Given, check};
pub(crate) use path::{Path, WS_SECURITY, named};

use self::path::Matcher;
use self::read::{Attribute, Document, Layout, Letters, Name, Node};
use super::json::write_length;
use super::parameters::ParameterizedValue;

/// The parts of a document that count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection {
    /// Only these with their content, if they name any, and the names and namespaces of the elements around them.
    pub(crate) only: Vec<Path>,
    /// Without these and their content.
    pub(crate) ignore: Vec<Path>,
}

/// The result of a selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    /// All but what is ignored.
    Whole,
    /// The named parts with their places.
    Picked,
}

/// Writes the canonical form of the parts that count. `None`: nothing was written.
pub(crate) fn write(
    body: &[u8],
    kind: &ParameterizedValue<'_>,
    selection: &Selection,
    out: &mut Vec<u8>,
) -> Option<Selected> {
    let text = decode::decode(body, kind.get("charset"))?;
    let document = read::read(&text)?;
    write_type(kind, out);
    let start = out.len();
    if !selection.only.is_empty() {
        if Writer::new(&document, selection, Some(&selection.only), out).write() {
            return Some(Selected::Picked);
        }
        out.truncate(start);
    }
    Writer::new(&document, selection, None, out).write();
    Some(Selected::Whole)
}

/// Writes the parameters of Content-Type except the charset, because SOAP 1.2 names the action there. They come before the
/// document, as a processing instruction with a name that no document can have.
fn write_type(kind: &ParameterizedValue<'_>, out: &mut Vec<u8>) {
    for (name, text) in kind.parameters.iter().filter(|(name, _)| name != b"charset") {
        out.extend_from_slice(b"<?xml:");
        out.extend_from_slice(name);
        out.push(b' ');
        write_length(out, text.len());
        out.extend_from_slice(text);
        out.extend_from_slice(b"?>");
    }
}

/// Whether a text is a name that a prefix or the local part of a name can be.
fn is_name(text: &str) -> bool {
    text.starts_with(read::begins_name) && text.chars().all(read::continues_name)
}

/// Replaces the comments beside a text, whatever their content.
const COMMENT: &[u8] = b"<!---->";

/// What was written last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Text,
    /// Text and a comment.
    Split,
    /// A comment, and no text before it.
    Comment,
    Else,
}

/// Why an open element is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// It counts.
    Counts,
    /// It contains an element that counts.
    Around,
    /// It may contain an element that counts. Otherwise the output since this place is removed.
    Perhaps(usize),
}

struct Open {
    name: Name,
    layout: Layout,
    reason: Reason,
}

struct Writer<'d, 'a> {
    document: &'d Document<'a>,
    ignore: Matcher<'d>,
    only: Option<Matcher<'d>>,
    open: Vec<Open>,
    /// The number of open elements in an ignored part.
    hidden: usize,
    before: Before,
    /// Whether `only` named anything.
    picked: bool,
    out: &'d mut Vec<u8>,
}

impl<'d, 'a> Writer<'d, 'a> {
    fn new(
        document: &'d Document<'a>,
        selection: &'d Selection,
        only: Option<&'d [Path]>,
        out: &'d mut Vec<u8>,
    ) -> Self {
        let (ignore, only) = (Matcher::new(&selection.ignore), only.map(Matcher::new));
        let (open, hidden, before, picked) = (Vec::new(), 0, Before::Else, false);
        Self { document, ignore, only, open, hidden, before, picked, out }
    }

    /// Whether `only` named anything.
    fn write(mut self) -> bool {
        self.document.nodes.iter().for_each(|node| self.node(node));
        self.picked
    }

    fn node(&mut self, node: &Node) {
        match node {
            Node::Start { .. } | Node::End if self.hidden > 0 => {
                let start = matches!(node, Node::Start { .. });
                self.hidden = if start { self.hidden + 1 } else { self.hidden - 1 };
            }
            _ if self.hidden > 0 => {}
            Node::Start { name, uri, first, last, layout } => {
                let attributes = self.document.attributes(*first, *last);
                self.start(*name, self.document.uri(*uri), attributes, *layout);
            }
            Node::End => self.end(),
            Node::Text(..) | Node::Split | Node::Instruction(_) if !self.counts() => {}
            Node::Text(piece, letters) => self.text(self.document.bytes(*piece), *letters),
            Node::Split => {
                self.before = match self.before {
                    Before::Text | Before::Split => Before::Split,
                    Before::Comment | Before::Else => Before::Comment,
                };
            }
            Node::Instruction(piece) => {
                self.close_text();
                self.put([b"<?", self.document.bytes(*piece), b"?>"]);
            }
        }
    }

    fn put(&mut self, texts: [&[u8]; 3]) {
        texts.into_iter().for_each(|text| self.out.extend_from_slice(text));
    }

    /// Whether the direct content of the innermost element counts.
    fn counts(&self) -> bool {
        let innermost = self.open.last().map(|open| open.reason);
        innermost.map_or(self.only.is_none(), |reason| reason == Reason::Counts)
    }

    fn start(&mut self, name: Name, uri: &[u8], attributes: &[Attribute], layout: Layout) {
        let local = self.document.local(name);
        let ignored = self.ignore.enter(uri, local);
        let named = self.only.as_mut().is_some_and(|only| only.enter(uri, local));
        self.picked |= named;
        if ignored {
            self.leave();
            self.hidden = 1;
            return;
        }
        self.close_text();
        let within = self.counts();
        let start = self.out.len();
        self.put([b"<", self.document.name(name), b""]);
        let counts = within || named;
        let mut reason = if counts { Reason::Counts } else { Reason::Perhaps(start) };
        for attribute in attributes {
            let name = self.document.name(attribute.name);
            let declares = name == b"xmlns" || name.starts_with(b"xmlns:");
            let names = |matcher: &Matcher<'_>| {
                let local = self.document.local(attribute.name);
                !declares && matcher.names(self.document.uri(attribute.uri), local)
            };
            let named = self.only.as_ref().is_some_and(names);
            self.picked |= named;
            if names(&self.ignore) || !(counts || declares || named) {
                continue;
            }
            if named && !counts {
                reason = Reason::Around;
            }
            self.put([b" ", name, b"=\""]);
            escape(self.document.bytes(attribute.value), quoted, self.out);
            self.out.push(b'"');
        }
        self.out.push(b'>');
        if reason == Reason::Counts || reason == Reason::Around {
            self.keep_around();
        }
        self.open.push(Open { name, layout, reason });
    }

    /// Marks the open elements as part of the output.
    fn keep_around(&mut self) {
        for open in self.open.iter_mut().rev() {
            if !matches!(open.reason, Reason::Perhaps(_)) {
                break;
            }
            open.reason = Reason::Around;
        }
    }

    fn leave(&mut self) {
        self.ignore.leave();
        if let Some(only) = &mut self.only {
            only.leave();
        }
    }

    fn end(&mut self) {
        self.close_text();
        self.leave();
        let Some(open) = self.open.pop() else { return };
        match open.reason {
            Reason::Perhaps(start) => self.out.truncate(start),
            Reason::Counts | Reason::Around => {
                self.put([b"</", self.document.name(open.name), b">"]);
            }
        }
    }

    /// Ends a text. A comment at the end of a text counts like one within it.
    fn close_text(&mut self) {
        if self.before == Before::Split {
            self.out.extend_from_slice(COMMENT);
        }
        self.before = Before::Else;
    }

    fn text(&mut self, text: &[u8], letters: Letters) {
        let layout = self.open.last().map_or(Layout::Counts, |open| open.layout);
        if (layout, letters) == (Layout::Ignored, Letters::Blanks) {
            return;
        }
        if matches!(self.before, Before::Split | Before::Comment) {
            self.out.extend_from_slice(COMMENT);
        }
        self.before = Before::Text;
        // Meant blanks where layout is left out: they are written as references, so that they still count when read again.
        match layout {
            Layout::Ignored => escape(text, blank, self.out),
            Layout::Counts => escape(text, plain, self.out),
        }
    }
}

/// The escape of a byte in text.
fn plain(byte: u8) -> Option<&'static [u8]> {
    match byte {
        b'&' => Some(b"&amp;"),
        b'<' => Some(b"&lt;"),
        b'>' => Some(b"&gt;"),
        b'\r' => Some(b"&#xD;"),
        _ => None,
    }
}

/// In text of blanks.
fn blank(byte: u8) -> Option<&'static [u8]> {
    if byte == b' ' { Some(b"&#x20;") } else { quoted(byte) }
}

/// In an attribute.
fn quoted(byte: u8) -> Option<&'static [u8]> {
    match byte {
        b'&' => Some(b"&amp;"),
        b'<' => Some(b"&lt;"),
        b'"' => Some(b"&quot;"),
        b'\t' => Some(b"&#x9;"),
        b'\n' => Some(b"&#xA;"),
        b'\r' => Some(b"&#xD;"),
        _ => None,
    }
}

fn escape(text: &[u8], special: impl Fn(u8) -> Option<&'static [u8]>, out: &mut Vec<u8>) {
    let mut rest = text;
    while let Some(at) = rest.iter().position(|b| special(*b).is_some()) {
        let (before, after) = rest.split_at_checked(at).unwrap_or_default();
        out.extend_from_slice(before);
        let (byte, after) = after.split_first().unwrap_or((&0, &[]));
        out.extend_from_slice(special(*byte).unwrap_or_default());
        rest = after;
    }
    out.extend_from_slice(rest);
}

#[cfg(test)]
mod tests;
