//! JSON: one canonical text for all texts of one meaning, and a tree over it for settings that pick parts.
//!
//! The canonical text removes the differences of member order, white space, string escapes and the spelling of numbers, and no
//! others. Numbers are exact decimals and never floating point.
//!
//! Invariant: two different documents never have the same canonical form. So the canonical form is JSON itself, and a text
//! that parsers are known to read differently has no canonical form and is compared byte by byte: duplicate member names,
//! lone surrogates, a byte order mark, bad UTF-8, exponents beyond 64 bits, nesting beyond [`DEPTH_MAX`].
//!
//! Only [`canonical()`] reads the bodies of callers. The tree reads its output. The depth is checked before anything recurses,
//! so no body can exhaust the stack.

mod canonical;

use std::ops::Range;

use serde_json::Value;
use serde_json_path::{JsonPath, PathElement};

pub(crate) use canonical::canonical;

/// How deep arrays and objects may be nested.
pub const DEPTH_MAX: usize = 128;

/// Bytes of the text.
type Span = Range<usize>;

/// The index of a node in a tree. Children come before their parent.
pub(crate) type NodeId = usize;

/// A value that has no parts, as derived keys use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scalar {
    /// Text.
    Text(String),
    /// A number, in one spelling for each value.
    Number(String),
    /// A truth value.
    Bool(bool),
}

#[derive(Clone, Debug)]
enum Parts {
    Scalar,
    /// A range of `Tree::items`.
    Array(Range<usize>),
    /// A range of `Tree::members`, sorted by name.
    Object(Range<usize>),
}

#[derive(Clone, Debug)]
struct Node {
    span: Span,
    parts: Parts,
}

/// A document.
#[derive(Debug)]
pub(crate) struct Tree {
    text: Vec<u8>,
    nodes: Vec<Node>,
    items: Vec<NodeId>,
    /// Names without their quotes, as they are spelt in the text.
    members: Vec<(Span, NodeId)>,
}

/// Which parts of a document count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection {
    /// Only the parts that these name, if they name any.
    pub(crate) only: Vec<JsonPath>,
    /// Without the parts that these name.
    pub(crate) ignore: Vec<JsonPath>,
}

/// The result of a selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    /// All but what is ignored, as JSON text.
    Whole,
    /// The named parts with their places: see [`Writer::picked`].
    Picked,
}

/// Writes the parts of a body that count. `None`: it cannot be read, and nothing was written.
pub(crate) fn write(body: &[u8], selection: &Selection, out: &mut Vec<u8>) -> Option<Selected> {
    let text = canonical(body)?;
    if selection.only.is_empty() && selection.ignore.is_empty() {
        *out = text;
        return Some(Selected::Whole);
    }
    Some(Tree::of(text).write(selection, out))
}

impl Tree {
    /// Reads a body. `None`: it is compared byte by byte.
    pub(crate) fn parse(body: &[u8]) -> Option<Self> {
        canonical(body).map(Self::of)
    }

    /// The tree of a canonical text.
    fn of(text: Vec<u8>) -> Self {
        let guess = text.len() / 8;
        let mut reader = Reader {
            text: &text,
            at: 0,
            nodes: Vec::with_capacity(guess),
            items: Vec::new(),
            members: Vec::with_capacity(guess / 2),
            open_items: Vec::new(),
            open_members: Vec::new(),
        };
        reader.value();
        let Reader { nodes, items, members, .. } = reader;
        Self { text, nodes, items, members }
    }

    fn root(&self) -> NodeId {
        self.nodes.len().saturating_sub(1)
    }

    fn bytes(&self, span: &Span) -> &[u8] {
        self.text.get(span.clone()).unwrap_or_default()
    }

    fn spelling(&self, id: NodeId) -> &[u8] {
        self.nodes.get(id).map(|node| self.bytes(&node.span)).unwrap_or_default()
    }

    fn elements(&self, range: &Range<usize>) -> &[NodeId] {
        self.items.get(range.clone()).unwrap_or_default()
    }

    fn fields(&self, range: &Range<usize>) -> &[(Span, NodeId)] {
        self.members.get(range.clone()).unwrap_or_default()
    }

    /// The document as `serde_json` holds it: only to find nodes by JSONPath. Numbers lose what a float cannot hold.
    pub(crate) fn to_value(&self) -> Value {
        self.value_of(self.root())
    }

    fn value_of(&self, id: NodeId) -> Value {
        match self.nodes.get(id).map(|node| &node.parts) {
            Some(Parts::Array(range)) => {
                self.elements(range).iter().map(|item| self.value_of(*item)).collect()
            }
            Some(Parts::Object(range)) => {
                let field =
                    |(name, id): &(Span, NodeId)| (unspelt(self.bytes(name)), self.value_of(*id));
                self.fields(range).iter().map(field).collect()
            }
            Some(Parts::Scalar) | None => match self.scalar(id) {
                None => Value::Null,
                Some(Scalar::Text(text)) => text.into(),
                Some(Scalar::Bool(truth)) => truth.into(),
                Some(Scalar::Number(text)) => {
                    let number = text.parse::<i64>().map(serde_json::Number::from).ok();
                    let number = number.or_else(|| text.parse::<u64>().map(Into::into).ok());
                    number.or_else(|| serde_json::Number::from_f64(text.parse().ok()?)).into()
                }
            },
        }
    }

    /// The node at a path of names and indexes.
    pub(crate) fn find<'p>(
        &self,
        path: impl IntoIterator<Item = &'p PathElement<'p>>,
    ) -> Option<NodeId> {
        let mut at = self.root();
        for step in path {
            at = match (&self.nodes.get(at)?.parts, step) {
                (Parts::Object(range), PathElement::Name(name)) => {
                    let (fields, name) = (self.fields(range), canonical::spelt(name));
                    let order = |(known, _): &(Span, NodeId)| self.bytes(known).cmp(&name);
                    let place = fields.binary_search_by(order).ok()?;
                    fields.get(place)?.1
                }
                (Parts::Array(range), PathElement::Index(index)) => {
                    *self.elements(range).get(*index)?
                }
                _ => return None,
            };
        }
        Some(at)
    }

    /// The value of a node without parts; `None` for null, arrays and objects.
    pub(crate) fn scalar(&self, id: NodeId) -> Option<Scalar> {
        let text = self.spelling(id);
        match text.first()? {
            b'"' => {
                let inside = text.get(1..text.len() - 1).unwrap_or_default();
                Some(Scalar::Text(unspelt(inside)))
            }
            b't' => Some(Scalar::Bool(true)),
            b'f' => Some(Scalar::Bool(false)),
            b'-' | b'0'..=b'9' => Some(Scalar::Number(String::from_utf8_lossy(text).into_owned())),
            _ => None,
        }
    }

    /// Writes the parts that count. If `only` matches nothing, the whole document counts, so that an unexpected document is
    /// compared and not ignored.
    pub(crate) fn write(&self, selection: &Selection, out: &mut Vec<u8>) -> Selected {
        let value = self.to_value();
        let dropped = self.located(&selection.ignore, &value);
        let mut writer = Writer { tree: self, dropped, out };
        if !selection.only.is_empty() {
            let picked = self.located(&selection.only, &value);
            if picked.named.contains(&true) {
                writer.picked(self.root(), &picked);
                return Selected::Picked;
            }
        }
        writer.value(self.root());
        Selected::Whole
    }

    /// Compares addresses and not paths, because walking a path of long names for each match would be slow.
    fn located(&self, paths: &[JsonPath], value: &Value) -> Located {
        let found = paths.iter().flat_map(|path| path.query(value));
        let mut found: Vec<*const Value> = found.map(std::ptr::from_ref).collect();
        if found.is_empty() {
            return Located::default();
        }
        found.sort_unstable();
        let mut named = vec![false; self.nodes.len()];
        self.mark(self.root(), value, &found, &mut named);
        let mut holding = vec![false; self.nodes.len()];
        for id in 0..holding.len() {
            let holds = |part: &NodeId| is(&named, *part) || is(&holding, *part);
            let holds = match self.nodes.get(id).map(|node| &node.parts) {
                Some(Parts::Array(range)) => self.elements(range).iter().any(holds),
                Some(Parts::Object(range)) => self.fields(range).iter().any(|(_, id)| holds(id)),
                Some(Parts::Scalar) | None => false,
            };
            if let Some(place) = holding.get_mut(id) {
                *place = holds;
            }
        }
        Located { named, holding }
    }

    /// Marks the nodes of the values that were found, which are sorted by address.
    fn mark(&self, id: NodeId, value: &Value, found: &[*const Value], named: &mut [bool]) {
        if let Some(named) = named.get_mut(id) {
            *named = found.binary_search(&std::ptr::from_ref(value)).is_ok();
        }
        match (self.nodes.get(id).map(|node| &node.parts), value) {
            (Some(Parts::Array(range)), Value::Array(values)) => {
                for (id, value) in self.elements(range).iter().zip(values) {
                    self.mark(*id, value, found, named);
                }
            }
            (Some(Parts::Object(range)), Value::Object(values)) => {
                let fields = self.fields(range);
                // Without escapes both are in the order of their names' bytes.
                if fields.iter().any(|(name, _)| self.bytes(name).contains(&b'\\')) {
                    let value = |name| values.get(&unspelt(self.bytes(name)));
                    let known = fields.iter().filter_map(|(name, id)| Some((*id, value(name)?)));
                    known.for_each(|(id, value)| self.mark(id, value, found, named));
                } else {
                    let known = fields.iter().zip(values.values());
                    known.for_each(|((_, id), value)| self.mark(*id, value, found, named));
                }
            }
            _ => {}
        }
    }
}

/// For each node whether a path names it; empty if the paths name nothing.
#[derive(Debug, Default)]
struct Located {
    named: Vec<bool>,
    /// Whether it contains a named node.
    holding: Vec<bool>,
}

fn is(marks: &[bool], id: NodeId) -> bool {
    marks.get(id).copied().unwrap_or(false)
}

/// A string that is spelt canonically, without its quotes.
fn unspelt(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    if !text.contains('\\') {
        return text.into_owned();
    }
    serde_json::from_str(&format!("\"{text}\"")).unwrap_or_default()
}

/// Reads a canonical text, which is known to be valid.
struct Reader<'t> {
    text: &'t [u8],
    at: usize,
    nodes: Vec<Node>,
    items: Vec<NodeId>,
    members: Vec<(Span, NodeId)>,
    /// Elements and members of the open arrays and objects, innermost last.
    open_items: Vec<NodeId>,
    open_members: Vec<(Span, NodeId)>,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn value(&mut self) -> NodeId {
        let start = self.at;
        let parts = match self.peek() {
            Some(b'"') => {
                self.string();
                Parts::Scalar
            }
            Some(b'{') => self.object(),
            Some(b'[') => self.array(),
            _ => {
                self.until(|byte| matches!(byte, b',' | b']' | b'}'));
                Parts::Scalar
            }
        };
        self.nodes.push(Node { span: start..self.at, parts });
        self.nodes.len() - 1
    }

    fn until(&mut self, end: impl Fn(u8) -> bool) {
        let rest = self.text.get(self.at..).unwrap_or_default();
        self.at += rest.iter().position(|byte| end(*byte)).unwrap_or(rest.len());
    }

    fn array(&mut self) -> Parts {
        let opened = self.open_items.len();
        self.at += 1;
        while !matches!(self.peek(), Some(b']') | None) {
            let item = self.value();
            self.open_items.push(item);
            self.at += usize::from(self.peek() == Some(b','));
        }
        self.at += 1;
        let first = self.items.len();
        self.items.extend(self.open_items.drain(opened..));
        Parts::Array(first..self.items.len())
    }

    fn object(&mut self) -> Parts {
        let opened = self.open_members.len();
        self.at += 1;
        while self.peek() == Some(b'"') {
            let name = self.string();
            self.at += 1;
            let value = self.value();
            self.open_members.push((name, value));
            self.at += usize::from(self.peek() == Some(b','));
        }
        self.at += 1;
        let first = self.members.len();
        self.members.extend(self.open_members.drain(opened..));
        Parts::Object(first..self.members.len())
    }

    fn string(&mut self) -> Span {
        self.at += 1;
        let start = self.at;
        loop {
            self.until(|byte| matches!(byte, b'"' | b'\\'));
            if self.peek() != Some(b'\\') {
                break;
            }
            self.at += 2;
        }
        self.at += 1;
        start..self.at - 1
    }
}

struct Writer<'t> {
    tree: &'t Tree,
    dropped: Located,
    out: &'t mut Vec<u8>,
}

impl Writer<'_> {
    fn keeps(&self, id: NodeId) -> bool {
        !is(&self.dropped.named, id)
    }

    /// A node without the dropped parts, as JSON text.
    fn value(&mut self, id: NodeId) {
        let tree = self.tree;
        if !self.keeps(id) {
            return;
        }
        match tree.nodes.get(id).map(|node| &node.parts) {
            Some(Parts::Array(range)) if is(&self.dropped.holding, id) => {
                self.out.push(b'[');
                let kept = tree.elements(range).iter().filter(|id| self.keeps(**id));
                for (index, id) in kept.copied().collect::<Vec<_>>().into_iter().enumerate() {
                    self.comma(index);
                    self.value(id);
                }
                self.out.push(b']');
            }
            Some(Parts::Object(range)) if is(&self.dropped.holding, id) => {
                self.out.push(b'{');
                let kept = tree.fields(range).iter().filter(|(_, id)| self.keeps(*id));
                for (index, (name, id)) in kept.collect::<Vec<_>>().into_iter().enumerate() {
                    self.comma(index);
                    self.name(name);
                    self.value(*id);
                }
                self.out.push(b'}');
            }
            _ => self.out.extend_from_slice(tree.spelling(id)),
        }
    }

    /// Only the picked parts of a node, as JSON text in which elements carry their index. So two documents with the same
    /// values at different places differ.
    fn picked(&mut self, id: NodeId, picked: &Located) {
        let tree = self.tree;
        if is(&picked.named, id) {
            return self.value(id);
        }
        let holds = |id: NodeId| is(&picked.named, id) || is(&picked.holding, id);
        match tree.nodes.get(id).map(|node| &node.parts) {
            Some(Parts::Array(range)) => {
                self.out.push(b'[');
                for (index, id) in tree.elements(range).iter().enumerate() {
                    if holds(*id) && self.keeps(*id) {
                        self.out.extend_from_slice(index.to_string().as_bytes());
                        self.out.push(b':');
                        self.picked(*id, picked);
                        self.out.push(b',');
                    }
                }
                self.out.push(b']');
            }
            Some(Parts::Object(range)) => {
                self.out.push(b'{');
                for (name, id) in tree.fields(range) {
                    if holds(*id) && self.keeps(*id) {
                        self.name(name);
                        self.picked(*id, picked);
                        self.out.push(b',');
                    }
                }
                self.out.push(b'}');
            }
            Some(Parts::Scalar) | None => {}
        }
    }

    fn comma(&mut self, index: usize) {
        if index > 0 {
            self.out.push(b',');
        }
    }

    fn name(&mut self, name: &Span) {
        self.out.push(b'"');
        self.out.extend_from_slice(self.tree.bytes(name));
        self.out.extend_from_slice(b"\":");
    }
}

/// A length in seven bits a byte, the last one below 128: no length is the beginning of another.
pub(crate) fn write_length(out: &mut Vec<u8>, length: usize) {
    let mut rest = length;
    while rest >= 0x80 {
        out.push(low_bits(rest) | 0x80);
        rest >>= 7;
    }
    out.push(low_bits(rest));
}

#[expect(clippy::cast_possible_truncation, reason = "seven bits fit a byte")]
fn low_bits(number: usize) -> u8 {
    (number & 0x7f) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(paths: &[&str]) -> Vec<JsonPath> {
        paths.iter().map(|path| JsonPath::parse(path).unwrap()).collect()
    }

    fn kept(only: &[&str], ignore: &[&str], text: &str) -> (Selected, String) {
        let selection = Selection { only: paths(only), ignore: paths(ignore) };
        let mut out = Vec::new();
        let kept = write(text.as_bytes(), &selection, &mut out).expect(text);
        (kept, String::from_utf8(out).unwrap())
    }

    #[test]
    fn ignored_nodes_are_left_out_wherever_numbers_are() {
        let write = |text: &str| kept(&[], &["$..t", "$.l[1]"], text);
        let plain = write(r#"{"l":[1,3],"n":1e400}"#);
        assert_eq!(plain, write(r#"{"n":1e400,"t":{"t":1},"l":[1,99]}"#));
        assert_ne!(plain, write(r#"{"n":1e400,"l":[2,99]}"#));
    }

    #[test]
    fn what_is_left_is_json_in_its_one_spelling() {
        let whole = |ignore: &[&str], text: &str| {
            let (kind, text) = kept(&[], ignore, text);
            assert_eq!(kind, Selected::Whole);
            text
        };
        let text = r#"{"b":[{"t":1,"v":"\u0022"},2,[3]],"a":{"t":{"x":1}},"t":0}"#;
        assert_eq!(whole(&["$..t"], text), r#"{"a":{},"b":[{"v":"\""},2,[3]]}"#);
        assert_eq!(
            whole(&["$.b[0]", "$.b[2][0]", "$.t"], text),
            r#"{"a":{"t":{"x":1}},"b":[2,[]]}"#
        );
        assert_eq!(whole(&["$.none"], text), whole(&[], text));
        assert_eq!(whole(&["$"], text), "");
        assert_eq!(whole(&["$['\"']"], r#"{"\"":1,"b":2}"#), r#"{"b":2}"#);
        // By its bytes the quote comes first, by its spelling second.
        let names = r#"{"\"":1,"A":2,"b":3}"#;
        assert_eq!(whole(&["$['\"']"], names), r#"{"A":2,"b":3}"#);
        assert_eq!(whole(&["$.A"], names), r#"{"\"":1,"b":3}"#);
        assert_eq!(whole(&["$['\\u0061']"], r#"{"\u0061":1,"b":2}"#), r#"{"b":2}"#);
    }

    #[test]
    fn only_what_is_named_counts_each_at_its_place() {
        let picked = |only: &[&str], ignore: &[&str], text: &str| {
            let (kind, text) = kept(only, ignore, text);
            assert_eq!(kind, Selected::Picked);
            text
        };
        let text = r#"{"id":1,"items":[{"sku":"a","n":1},{"n":2},{"sku":"b"}],"at":"09:00"}"#;
        assert_eq!(picked(&["$.id"], &[], text), r#"{"id":1,}"#);
        let skus = r#"{"items":[0:{"sku":"a",},2:{"sku":"b",},],}"#;
        assert_eq!(picked(&["$.items[*].sku"], &[], text), skus);
        assert_eq!(
            picked(&["$.id", "$.items"], &["$..n"], text),
            r#"{"id":1,"items":[{"sku":"a"},{},{"sku":"b"}],}"#
        );
        // The whole holds its parts.
        assert_eq!(picked(&["$.id", "$"], &["$.items"], text), r#"{"at":"09:00","id":1}"#);
        // Named, and ignored: nothing is left, which is not the same as nothing that is named.
        assert_eq!(picked(&["$.id"], &["$.id"], text), "{}");
        assert_eq!(picked(&["$.items[0].n"], &["$.items"], text), "{}");
        // The same values at other places.
        let two = |text: &str| picked(&["$[*].x"], &[], text);
        assert_ne!(two(r#"[{"x":1},{}]"#), two(r#"[{},{"x":1}]"#));
        assert_eq!(two(r#"[{"x":1},{}]"#), two(r#"[{"x":1.0,"y":2}]"#));
    }

    #[test]
    fn where_nothing_is_named_the_whole_counts() {
        let (kind, text) = kept(&["$.id"], &["$.t"], r#"{"t":1,"order":2}"#);
        assert_eq!((kind, text.as_str()), (Selected::Whole, r#"{"order":2}"#));
        assert_ne!(kept(&["$.id"], &[], r#"{"a":1}"#), kept(&["$.id"], &[], r#"{"a":2}"#));
    }

    #[test]
    fn many_marks_take_linear_time_and_no_more_text_than_the_body() {
        // Quadratic, this would be 10^10 steps, or a text of as many bytes.
        let name = "n".repeat(50_000);
        let text = format!("{{\"{name}\":[{}1]}}", "1,".repeat(100_000));
        let (_, picked) = kept(&["$..*"], &[], &text);
        assert!(picked.len() <= text.len() + 10);
        let (_, picked) = kept(&["$.*[*]"], &["$..nothing"], &text);
        assert!(picked.len() <= 8 * text.len());
        assert_eq!(kept(&[], &["$.*[*]"], &text).1, format!("{{\"{name}\":[]}}"));
    }

    #[test]
    fn a_scalar_is_found_by_its_path() {
        let tree =
            Tree::parse(r#"{"b\n":[1.50,"x\u0022",null,true],"a":1e400}"#.as_bytes()).unwrap();
        let value = tree.to_value();
        let find = |path: &str| {
            let path = JsonPath::parse(path).unwrap();
            let located = path.query_located(&value);
            tree.scalar(tree.find(located.first()?.location().iter())?)
        };
        assert_eq!(find("$['b\\n'][0]"), Some(Scalar::Number("1.5".to_owned())));
        assert_eq!(find("$['b\\n'][1]"), Some(Scalar::Text("x\"".to_owned())));
        assert_eq!(find("$['b\\n'][2]"), None);
        assert_eq!(find("$['b\\n'][3]"), Some(Scalar::Bool(true)));
        assert_eq!(find("$.a"), Some(Scalar::Number("1e400".to_owned())));
        assert_eq!(find("$['b\\n']"), None);
        assert_eq!(find("$.none"), None);
    }
}
