//! Paths to elements and attributes in settings: a small part of XPath, matched while the document is read.
//!
//! Supported are `/a/b` and `//b`, names as `b` (of no namespace), `p:b`, `p:*`, `*:b` (of any) and `*`, and at the end `@`
//! before such a name for attributes. A prefix stands for its namespace, so the document may use another one. Everything
//! else is refused when the configuration is read.

use super::namespaces::{Given, namespace};

/// The name for the parts that WS-Security adds to a signed message; see [`named`].
pub(crate) const WS_SECURITY: &str = "ws-security";

/// The content of the header `wsse:Security` (tokens, time stamps, signatures), and the ids by which a signature refers to the
/// body and to other headers: a signer makes new ones for each message. For the body some signers use an `Id` without
/// namespace or `xml:id`. Ids within the content of the body are not included, because content that counts may refer to
/// them.
const WS_SECURITY_PATHS: [&str; 10] = [
    "/soap:Envelope/soap:Header/wsse:Security",
    "/soap:Envelope/soap:Header/*/@wsu:Id",
    "/soap:Envelope/soap:Body/@wsu:Id",
    "/soap:Envelope/soap:Body/@Id",
    "/soap:Envelope/soap:Body/@xml:id",
    "/soap12:Envelope/soap12:Header/wsse:Security",
    "/soap12:Envelope/soap12:Header/*/@wsu:Id",
    "/soap12:Envelope/soap12:Body/@wsu:Id",
    "/soap12:Envelope/soap12:Body/@Id",
    "/soap12:Envelope/soap12:Body/@xml:id",
];

/// The paths that a name stands for, whatever the prefixes in the configuration; `None`: the name is not known.
pub(crate) fn named(text: &str) -> Option<Vec<Path>> {
    let paths = WS_SECURITY_PATHS.iter().filter_map(|path| Path::parse(path, &Given::new()).ok());
    (text == WS_SECURITY).then(|| paths.collect())
}

/// The most steps to elements in one path: one bit of a word for each.
const STEPS_MAX: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Child,
    Descendant,
}

/// The required name; `None`: any.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Test {
    namespace: Option<String>,
    local: Option<String>,
}

impl Test {
    fn fits(&self, uri: &[u8], local: &[u8]) -> bool {
        let fits = |asked: &Option<String>, is: &[u8]| {
            asked.as_ref().is_none_or(|asked| asked.as_bytes() == is)
        };
        fits(&self.local, local) && fits(&self.namespace, uri)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    axis: Axis,
    test: Test,
}

/// A path to elements, or to attributes of elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    elements: Vec<Step>,
    attribute: Option<Step>,
}

impl Path {
    /// Reads a path.
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
    pub(crate) fn parse(text: &str, given: &Given) -> Result<Self, String> {
        const HOW: &str = "write steps such as /a/b, //b, p:b, * and, at the end, @b; nothing else of XPath is read";
        let wrong = || format!("{text:?} is no path that is read here: {HOW}");
        let mut path = Self { elements: Vec::new(), attribute: None };
        let mut rest = text;
        while !rest.is_empty() {
            if path.attribute.is_some() {
                return Err(wrong());
            }
            let after = rest.strip_prefix('/').ok_or_else(wrong)?;
            let (axis, after) = match after.strip_prefix('/') {
                Some(after) => (Axis::Descendant, after),
                None => (Axis::Child, after),
            };
            let (name, next) =
                after.split_at_checked(after.find('/').unwrap_or(after.len())).ok_or_else(wrong)?;
            rest = next;
            match name.strip_prefix('@') {
                Some(name) => {
                    path.attribute = Some(Step {
                        axis,
                        test: test(name, given).map_err(|e| e.unwrap_or_else(wrong))?,
                    })
                }
                None => path.elements.push(Step {
                    axis,
                    test: test(name, given).map_err(|e| e.unwrap_or_else(wrong))?,
                }),
            }
        }
        let rootless = matches!(&path.attribute, Some(step) if step.axis == Axis::Child)
            && path.elements.is_empty();
        let none = path.attribute.is_none() && path.elements.is_empty();
        if rootless || none || path.elements.len() > STEPS_MAX {
            return Err(wrong());
        }
        Ok(path)
    }

    /// The path with namespaces in place of prefixes, so that equal paths have equal texts.
    pub(crate) fn spelled(&self) -> String {
        let mut text = String::new();
        let mut spell = |step: &Step, sign: &str| {
            let any = "*".to_owned();
            let namespace = step.test.namespace.as_ref().unwrap_or(&any);
            let local = step.test.local.as_ref().unwrap_or(&any);
            let axis = if step.axis == Axis::Child { "/" } else { "//" };
            text.push_str(&format!("{axis}{sign}{{{namespace}}}{local}"));
        };
        self.elements.iter().for_each(|step| spell(step, ""));
        self.attribute.iter().for_each(|step| spell(step, "@"));
        text
    }
}

/// Reads a name. The error is a sentence, or nothing if the name has the wrong form.
fn test(text: &str, given: &Given) -> Result<Test, Option<String>> {
    let name = |text: &str| super::is_name(text).then(|| text.to_owned()).ok_or(None);
    let local = |text: &str| if text == "*" { Ok(None) } else { name(text).map(Some) };
    match text.split_once(':') {
        None if text == "*" => Ok(Test { namespace: None, local: None }),
        None => Ok(Test { namespace: Some(String::new()), local: Some(name(text)?) }),
        Some(("*", after)) => Ok(Test { namespace: None, local: Some(name(after)?) }),
        Some((prefix, after)) => {
            let local = local(after)?;
            let prefix = name(prefix)?;
            let unknown = || {
                Some(format!(
                    "the prefix {prefix:?} is not known; give its namespace: xml_namespaces = {{ {prefix} = \"...\" }}"
                ))
            };
            let uri = namespace(&prefix, given).ok_or_else(unknown)?;
            Ok(Test { namespace: Some(uri.to_owned()), local })
        }
    }
}

/// The steps of one path that match at one element: bit `n` for the first `n` steps.
#[derive(Clone, Copy, Debug)]
struct Matched {
    /// The last of these steps matches the element itself.
    here: u64,
    /// It matches an element around it.
    above: u64,
}

/// Follows a document and finds the named elements. The cost of an element does not depend on the elements before it.
#[derive(Debug)]
pub(super) struct Matcher<'p> {
    paths: &'p [Path],
    /// For the document and each open element, one entry for each path.
    levels: Vec<Matched>,
}

impl<'p> Matcher<'p> {
    pub(super) fn new(paths: &'p [Path]) -> Self {
        Self { paths, levels: vec![Matched { here: 1, above: 0 }; paths.len()] }
    }

    /// Enters an element. Returns whether a path names it.
    pub(super) fn enter(&mut self, uri: &[u8], local: &[u8]) -> bool {
        let mut named = false;
        let parents = self.levels.len().saturating_sub(self.paths.len());
        for (index, path) in self.paths.iter().enumerate() {
            let Some(parent) = self.levels.get(parents + index).copied() else { continue };
            let above = parent.above | parent.here;
            let mut here = 0;
            for (step, bit) in path.elements.iter().zip(0_u32..) {
                let from = if step.axis == Axis::Child { parent.here } else { above };
                if from & (1 << bit) != 0 && step.test.fits(uri, local) {
                    here |= 2 << bit;
                }
            }
            named |= path.attribute.is_none() && here & path.whole() != 0;
            self.levels.push(Matched { here, above });
        }
        named
    }

    /// Leaves the innermost element.
    pub(super) fn leave(&mut self) {
        self.levels.truncate(self.levels.len().saturating_sub(self.paths.len()));
    }

    /// Whether a path names an attribute of the innermost element.
    pub(super) fn names(&self, uri: &[u8], local: &[u8]) -> bool {
        let start = self.levels.len().saturating_sub(self.paths.len());
        let found = self.levels.get(start..).unwrap_or_default();
        self.paths.iter().zip(found).any(|(path, found)| {
            path.attribute.as_ref().is_some_and(|step| {
                let above = if step.axis == Axis::Child { 0 } else { found.above };
                (found.here | above) & path.whole() != 0 && step.test.fits(uri, local)
            })
        })
    }
}

impl Path {
    /// The bit of all its steps to elements.
    fn whole(&self) -> u64 {
        1 << self.elements.len()
    }
}
