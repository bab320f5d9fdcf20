//! A strict parser for XML 1.0 with namespaces and without a document type.
//!
//! Every rule of well-formedness is checked, because only a document that all parsers read alike may be compared by meaning:
//! names, nesting, repeated attributes (by name or by namespace), references, characters, undeclared prefixes. A document
//! type is not read, so only the five entities of XML exist, and nothing is ever expanded or fetched.
//!
//! The document is a flat list of nodes in their order. Text is a range of the body unless it must be rewritten. Nothing here
//! recurses, and the depth is bounded.

use memchr::{memchr, memmem};

use super::namespaces::{Declared, Scope, Uri, Uris};
use crate::fingerprint::json::DEPTH_MAX;

/// Bytes of the text, or of the document's own buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Piece {
    start: u32,
    end: u32,
    own: bool,
}

/// A qualified name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name {
    start: u32,
    /// Where its local part begins.
    local: u32,
    end: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Attribute {
    pub(super) name: Name,
    pub(super) value: Piece,
    pub(super) uri: Uri,
}

/// What a text consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Letters {
    /// Not only blanks.
    Words,
    /// Blanks of the layout.
    Blanks,
    /// Blanks that are written as references or in a CDATA section, and so are meant.
    Meant,
}

/// Whether blanks in an element are layout: they are only between its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Counts,
    Ignored,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Node {
    Start {
        name: Name,
        uri: Uri,
        first: u32,
        last: u32,
        layout: Layout,
    },
    End,
    Text(Piece, Letters),
    /// The place of comments. The texts before and after them are separate.
    Split,
    /// Target and data, as written.
    Instruction(Piece),
}

/// A well-formed document.
#[derive(Debug)]
pub(super) struct Document<'a> {
    text: &'a [u8],
    own: Vec<u8>,
    pub(super) nodes: Vec<Node>,
    attributes: Vec<Attribute>,
    uris: Uris,
}

impl Document<'_> {
    pub(super) fn bytes(&self, piece: Piece) -> &[u8] {
        self::piece(self.text, &self.own, piece)
    }

    pub(super) fn name(&self, name: Name) -> &[u8] {
        slice(self.text, name.start, name.end)
    }

    pub(super) fn local(&self, name: Name) -> &[u8] {
        slice(self.text, name.local, name.end)
    }

    pub(super) fn uri(&self, uri: Uri) -> &[u8] {
        self.uris.text(uri)
    }

    pub(super) fn attributes(&self, first: u32, last: u32) -> &[Attribute] {
        self.attributes.get(wide(first)..wide(last)).unwrap_or_default()
    }
}

fn piece<'t>(text: &'t [u8], own: &'t [u8], piece: Piece) -> &'t [u8] {
    slice(if piece.own { own } else { text }, piece.start, piece.end)
}

fn slice(from: &[u8], start: u32, end: u32) -> &[u8] {
    from.get(wide(start)..wide(end)).unwrap_or_default()
}

/// Reads a text after its declaration. `None`: it is compared byte by byte.
pub(super) fn read(text: &str) -> Option<Document<'_>> {
    // Every offset fits, also into the own buffer, because rewritten text never becomes longer.
    u32::try_from(text.len()).ok()?;
    let controls = text.bytes().any(|b| b < 0x20 && !is_blank(b));
    if controls || !text.is_ascii() && text.contains(['\u{fffe}', '\u{ffff}']) {
        return None;
    }
    let reader = Reader {
        text: text.as_bytes(),
        letters: text,
        at: 0,
        own: Vec::new(),
        nodes: Vec::with_capacity(text.len() / 16),
        attributes: Vec::new(),
        new: Vec::new(),
        scope: Scope::new(),
        open: Vec::new(),
        rooted: false,
    };
    reader.document()
}

/// An open element.
struct Open {
    node: usize,
    name: Name,
    scope: usize,
    elements: bool,
    words: bool,
    preserved: bool,
}

struct Reader<'a> {
    text: &'a [u8],
    letters: &'a str,
    at: usize,
    own: Vec<u8>,
    nodes: Vec<Node>,
    attributes: Vec<Attribute>,
    /// The attributes of the tag that is being read.
    new: Vec<Attribute>,
    scope: Scope<'a>,
    open: Vec<Open>,
    rooted: bool,
}

impl<'a> Reader<'a> {
    fn document(mut self) -> Option<Document<'a>> {
        while self.at < self.text.len() {
            self.next()?;
        }
        if !self.rooted || !self.open.is_empty() {
            return None;
        }
        let (text, own, nodes, attributes) = (self.text, self.own, self.nodes, self.attributes);
        Some(Document { text, own, nodes, attributes, uris: self.scope.into_uris() })
    }

    fn next(&mut self) -> Option<()> {
        let rest = self.rest();
        match rest {
            [b'<', b'/', ..] => self.end(),
            [b'<', b'?', ..] => self.instruction(),
            [b'<', b'!', b'-', b'-', ..] => self.comment(),
            [b'<', b'!', ..] if !rest.starts_with(CDATA) => None,
            [b'<', ..] if !rest.starts_with(CDATA) => self.start(),
            _ if self.open.is_empty() => self.blank().then_some(()),
            _ => self.run(),
        }
    }

    fn rest(&self) -> &'a [u8] {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek() == Some(byte)).then(|| self.at += 1)
    }

    /// Whether there was anything blank.
    fn blank(&mut self) -> bool {
        let start = self.at;
        while self.peek().is_some_and(is_blank) {
            self.at += 1;
        }
        self.at > start
    }

    fn piece(&self, start: usize) -> Piece {
        Piece { start: narrow(start), end: narrow(self.at), own: false }
    }

    /// What was added to the own buffer.
    fn own(&self, start: usize) -> Piece {
        Piece { start: narrow(start), end: narrow(self.own.len()), own: true }
    }

    fn comment(&mut self) -> Option<()> {
        self.at += 4;
        self.at += memmem::find(self.rest(), b"--")? + 2;
        self.take(b'>')?;
        if !matches!(self.nodes.last(), Some(Node::Split)) {
            self.nodes.push(Node::Split);
        }
        Some(())
    }

    fn instruction(&mut self) -> Option<()> {
        self.at += 2;
        let start = self.at;
        let target = self.part()?;
        if self.text.get(target..self.at)?.eq_ignore_ascii_case(b"xml") {
            return None;
        }
        let named = self.at;
        let blank = self.blank();
        let length = memmem::find(self.rest(), b"?>")?;
        if !blank && length > 0 {
            return None;
        }
        let data = self.rest().get(..length)?;
        self.at += length;
        let plain = named + 1 == self.at - length && self.text.get(named) == Some(&b' ');
        let piece = if (plain || length == 0) && memchr(b'\r', data).is_none() {
            let end = if length == 0 { named } else { self.at };
            Piece { end: narrow(end), ..self.piece(start) }
        } else {
            let own = self.own.len();
            self.own.extend_from_slice(self.text.get(start..named)?);
            self.own.push(b' ');
            self.lines(data);
            self.own(own)
        };
        self.at += 2;
        self.nodes.push(Node::Instruction(piece));
        Some(())
    }

    /// Adds a text with every line end as `\n`.
    fn lines(&mut self, text: &[u8]) {
        let mut rest = text;
        while let Some(end) = memchr(b'\r', rest) {
            self.own.extend_from_slice(rest.get(..end).unwrap_or_default());
            self.own.push(b'\n');
            rest = rest.get(end + 1..).unwrap_or_default();
            rest = rest.strip_prefix(b"\n").unwrap_or(rest);
        }
        self.own.extend_from_slice(rest);
    }

    /// Reads a name without a colon. Returns its start.
    fn part(&mut self) -> Option<usize> {
        let start = self.at;
        let mut first = true;
        while let Some(byte) = self.peek() {
            let length = if byte.is_ascii() {
                let letter = byte.is_ascii_alphabetic() || byte == b'_';
                let later = byte.is_ascii_digit() || byte == b'-' || byte == b'.';
                usize::from(letter || later && !first)
            } else {
                let letter = self.letters.get(self.at..)?.chars().next()?;
                let fits = if first { begins_name(letter) } else { continues_name(letter) };
                if fits { letter.len_utf8() } else { 0 }
            };
            if length == 0 {
                break;
            }
            self.at += length;
            first = false;
        }
        (!first).then_some(start)
    }

    fn name(&mut self) -> Option<Name> {
        let start = self.part()?;
        let mut local = start;
        if self.take(b':').is_some() {
            local = self.part()?;
        }
        Some(Name { start: narrow(start), local: narrow(local), end: narrow(self.at) })
    }

    fn name_bytes(&self, name: Name) -> &'a [u8] {
        slice(self.text, name.start, name.end)
    }

    fn prefix(&self, name: Name) -> &'a [u8] {
        slice(self.text, name.start, name.local.saturating_sub(1))
    }

    fn start(&mut self) -> Option<()> {
        if self.open.len() >= DEPTH_MAX || self.open.is_empty() && self.rooted {
            return None;
        }
        self.at += 1;
        let name = self.name()?;
        let mut new = std::mem::take(&mut self.new);
        new.clear();
        let empty = loop {
            let blank = self.blank();
            match self.peek()? {
                b'>' => break false,
                b'/' => break true,
                _ if blank => new.push(self.attribute()?),
                _ => return None,
            }
        };
        self.at += usize::from(empty);
        self.take(b'>')?;
        if let Some(parent) = self.open.last_mut() {
            parent.elements = true;
        }
        self.rooted = true;
        let scope = self.scope.mark();
        let (first, last, preserved) = self.bind(&mut new)?;
        self.new = new;
        let uri = self.scope.resolve(self.prefix(name))?;
        let node = self.nodes.len();
        self.nodes.push(Node::Start { name, uri, first, last, layout: Layout::Counts });
        let open = Open { node, name, scope, elements: false, words: false, preserved };
        self.open.push(open);
        if empty { self.close() } else { Some(()) }
    }

    fn attribute(&mut self) -> Option<Attribute> {
        let name = self.name()?;
        self.blank();
        self.take(b'=')?;
        self.blank();
        let quote = self.peek().filter(|b| matches!(b, b'"' | b'\''))?;
        self.at += 1;
        let start = self.at;
        let mut own = None;
        let mut run = start;
        loop {
            let stops = |b: &u8| *b == quote || matches!(b, b'<' | b'&' | b'\t' | b'\n' | b'\r');
            self.at += self.rest().iter().position(stops)?;
            let stop = self.peek()?;
            if stop == quote && own.is_none() {
                let value = self.piece(start);
                self.at += 1;
                return Some(Attribute { name, value, uri: 0 });
            }
            let begun = *own.get_or_insert(self.own.len());
            self.own.extend_from_slice(self.text.get(run..self.at)?);
            match stop {
                b'<' => return None,
                b'&' => self.reference()?,
                stop if stop == quote => {
                    self.at += 1;
                    return Some(Attribute { name, value: self.own(begun), uri: 0 });
                }
                _ => {
                    self.at += if self.rest().starts_with(b"\r\n") { 2 } else { 1 };
                    self.own.push(b' ');
                }
            }
            run = self.at;
        }
    }

    /// Adds the namespace declarations among the new attributes, resolves their namespaces, and sorts them by name. Returns
    /// whether blanks are kept.
    fn bind(&mut self, new: &mut [Attribute]) -> Option<(u32, u32, bool)> {
        new.sort_unstable_by(|a, b| self.name_bytes(a.name).cmp(self.name_bytes(b.name)));
        let order =
            |a: &Attribute, b: &Attribute| self.name_bytes(a.name) < self.name_bytes(b.name);
        if !new.is_sorted_by(order) {
            return None;
        }
        let first = self.attributes.len();
        let mut preserved = self.open.last().is_some_and(|parent| parent.preserved);
        let text = self.text;
        let declares = |attribute: &&Attribute| {
            let name = slice(text, attribute.name.start, attribute.name.end);
            name == b"xmlns" || name.starts_with(b"xmlns:")
        };
        for attribute in new.iter().filter(declares) {
            let prefixed = attribute.name.local != attribute.name.start;
            let local = slice(text, attribute.name.local, attribute.name.end);
            let prefix = if prefixed { local } else { b"" };
            let declared = self.scope.declare(prefix, piece(text, &self.own, attribute.value))?;
            if declared == Declared::New {
                self.attributes.push(*attribute);
            }
        }
        for attribute in new.iter().filter(|attribute| !declares(attribute)) {
            let prefix = self.prefix(attribute.name);
            let uri = if prefix.is_empty() { 0 } else { self.scope.resolve(prefix)? };
            self.attributes.push(Attribute { uri, ..*attribute });
            if self.name_bytes(attribute.name) == b"xml:space" {
                preserved = piece(text, &self.own, attribute.value) != b"default";
            }
        }
        let kept = self.attributes.get(first..)?;
        if kept.len() > 1 && !self.distinct(kept) {
            return None;
        }
        Some((narrow(first), narrow(self.attributes.len()), preserved))
    }

    /// Whether no two attributes have the same name and namespace.
    fn distinct(&self, attributes: &[Attribute]) -> bool {
        let prefixed = attributes.iter().filter(|attribute| attribute.uri != 0);
        let local = |name: Name| slice(self.text, name.local, name.end);
        let mut names = prefixed.map(|a| (a.uri, local(a.name))).collect::<Vec<_>>();
        names.sort_unstable();
        names.is_sorted_by(|a, b| a < b)
    }

    fn end(&mut self) -> Option<()> {
        self.at += 2;
        let name = self.name()?;
        self.blank();
        self.take(b'>')?;
        let open = self.open.last()?;
        (self.name_bytes(open.name) == self.name_bytes(name)).then_some(())?;
        self.close()
    }

    fn close(&mut self) -> Option<()> {
        let open = self.open.pop()?;
        self.scope.leave(open.scope);
        if open.elements && !open.words && !open.preserved {
            let start = self.nodes.get_mut(open.node)?;
            if let Node::Start { layout, .. } = start {
                *layout = Layout::Ignored;
            }
        }
        self.nodes.push(Node::End);
        Some(())
    }

    /// Text, references and CDATA sections up to the next tag, comment or instruction.
    fn run(&mut self) -> Option<()> {
        let start = self.at;
        self.plain()?;
        let more = |rest: &[u8]| matches!(rest, [b'&' | b'\r', ..]) || rest.starts_with(CDATA);
        if !more(self.rest()) {
            let blank = self.text.get(start..self.at)?.iter().copied().all(is_blank);
            let letters = if blank { Letters::Blanks } else { Letters::Words };
            return self.push(self.piece(start), letters);
        }
        let own = self.own.len();
        let mut blanks = Letters::Blanks;
        self.own.extend_from_slice(self.text.get(start..self.at)?);
        while more(self.rest()) {
            if self.peek() == Some(b'\r') {
                self.at += if self.rest().starts_with(b"\r\n") { 2 } else { 1 };
                self.own.push(b'\n');
            } else {
                blanks = Letters::Meant;
                if self.peek() == Some(b'&') { self.reference()? } else { self.cdata()? }
            }
            let start = self.at;
            self.plain()?;
            self.own.extend_from_slice(self.text.get(start..self.at)?);
        }
        let blank = self.own.get(own..)?.iter().copied().all(is_blank);
        self.push(self.own(own), if blank { blanks } else { Letters::Words })
    }

    fn push(&mut self, piece: Piece, letters: Letters) -> Option<()> {
        if piece.start < piece.end {
            self.open.last_mut()?.words |= letters == Letters::Words;
            self.nodes.push(Node::Text(piece, letters));
        }
        Some(())
    }

    /// Goes on to the next markup, reference or carriage return.
    fn plain(&mut self) -> Option<()> {
        let rest = self.rest();
        let length = memchr::memchr3(b'<', b'&', b'\r', rest).unwrap_or(rest.len());
        self.at += length;
        let text = rest.get(..length)?;
        let bracket = memchr(b']', text).and_then(|at| text.get(at..)).unwrap_or_default();
        memmem::find(bracket, b"]]>").is_none().then_some(())
    }

    fn cdata(&mut self) -> Option<()> {
        self.at += CDATA.len();
        let length = memmem::find(self.rest(), b"]]>")?;
        self.lines(self.rest().get(..length)?);
        self.at += length + 3;
        Some(())
    }

    fn reference(&mut self) -> Option<()> {
        self.at += 1;
        // The longest reference is a number with leading zeros. Many of them have no use.
        let rest = self.rest();
        let end = memchr(b';', rest.get(..REFERENCE_MAX).unwrap_or(rest))?;
        let text = rest.get(..end)?;
        self.at += end + 1;
        let letter = match text {
            b"amp" => '&',
            b"lt" => '<',
            b"gt" => '>',
            b"quot" => '"',
            b"apos" => '\'',
            [b'#', b'x', digits @ ..] => character(digits, 16)?,
            [b'#', digits @ ..] => character(digits, 10)?,
            _ => return None,
        };
        self.own.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
        Some(())
    }
}

const CDATA: &[u8] = b"<![CDATA[";

/// Longest reference that is read, with its semicolon.
const REFERENCE_MAX: usize = 32;

fn character(digits: &[u8], radix: u32) -> Option<char> {
    let code = digits.iter().try_fold(None, |code: Option<u32>, digit| {
        let digit = char::from(*digit).to_digit(radix)?;
        Some(Some(code.unwrap_or(0).checked_mul(radix)?.checked_add(digit)?))
    })?;
    let allowed = |letter: &char| match letter {
        '\t' | '\n' | '\r' => true,
        '\u{fffe}' | '\u{ffff}' => false,
        letter => *letter >= ' ',
    };
    char::from_u32(code?).filter(allowed)
}

pub(super) fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// `NameStartChar` of XML 1.0, fifth edition, without the colon.
pub(super) fn begins_name(letter: char) -> bool {
    matches!(letter,
        'A'..='Z' | '_' | 'a'..='z' | '\u{c0}'..='\u{d6}' | '\u{d8}'..='\u{f6}' | '\u{f8}'..='\u{2ff}'
        | '\u{370}'..='\u{37d}' | '\u{37f}'..='\u{1fff}' | '\u{200c}'..='\u{200d}'
        | '\u{2070}'..='\u{218f}' | '\u{2c00}'..='\u{2fef}' | '\u{3001}'..='\u{d7ff}'
        | '\u{f900}'..='\u{fdcf}' | '\u{fdf0}'..='\u{fffd}' | '\u{10000}'..='\u{effff}')
}

/// `NameChar`, without the colon.
pub(super) fn continues_name(letter: char) -> bool {
    begins_name(letter)
        || matches!(letter,
            '-' | '.' | '0'..='9' | '\u{b7}' | '\u{300}'..='\u{36f}' | '\u{203f}'..='\u{2040}')
}

/// An offset; `read` has seen that it fits.
fn narrow(offset: usize) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX)
}

fn wide(offset: u32) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
