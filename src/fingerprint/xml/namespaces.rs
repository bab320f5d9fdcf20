//! Namespace prefixes: the well-known ones for paths in the configuration, and the ones in scope at a place of a document.

use std::collections::{BTreeMap, HashMap};

/// Known without `xml_namespaces`. A prefix that stands for two namespaces in practice (`s`, in SOAP 1.1 and 1.2) is not here.
const WELL_KNOWN: &[(&str, &str)] = &[
    ("ds", "http://www.w3.org/2000/09/xmldsig#"),
    ("env", "http://www.w3.org/2003/05/soap-envelope"),
    ("saml", "urn:oasis:names:tc:SAML:1.0:assertion"),
    ("saml2", "urn:oasis:names:tc:SAML:2.0:assertion"),
    ("soap", "http://schemas.xmlsoap.org/soap/envelope/"),
    ("SOAP-ENV", "http://schemas.xmlsoap.org/soap/envelope/"),
    ("soap12", "http://www.w3.org/2003/05/soap-envelope"),
    ("soapenv", "http://schemas.xmlsoap.org/soap/envelope/"),
    ("wsa", "http://www.w3.org/2005/08/addressing"),
    ("wsse", "http://docs.oasis-open.org/wss/2004/01/oasis-200401-wss-wssecurity-secext-1.0.xsd"),
    ("wsu", "http://docs.oasis-open.org/wss/2004/01/oasis-200401-wss-wssecurity-utility-1.0.xsd"),
    ("xenc", "http://www.w3.org/2001/04/xmlenc#"),
    ("xlink", "http://www.w3.org/1999/xlink"),
    ("xml", XML),
    ("xs", "http://www.w3.org/2001/XMLSchema"),
    ("xsd", "http://www.w3.org/2001/XMLSchema"),
    ("xsi", "http://www.w3.org/2001/XMLSchema-instance"),
];

/// The namespace of the prefix `xml`. No other prefix may have it.
const XML: &str = "http://www.w3.org/XML/1998/namespace";
/// The namespace of the prefix `xmlns`, which cannot be declared.
const XMLNS: &str = "http://www.w3.org/2000/xmlns/";

/// Prefixes that the configuration gives, and their namespaces.
pub type Given = BTreeMap<String, String>;

/// The namespace of a prefix in a path.
pub(super) fn namespace<'a>(prefix: &str, given: &'a Given) -> Option<&'a str> {
    let well_known = || WELL_KNOWN.iter().find(|(known, _)| *known == prefix).map(|(_, uri)| *uri);
    given.get(prefix).map(String::as_str).or_else(well_known)
}

/// What is wrong with an entry of `xml_namespaces`.
///
/// # Errors
/// A sentence that says what to do.
pub fn check(prefix: &str, uri: &str) -> Result<(), String> {
    if matches!(prefix, "xml" | "xmlns") {
        return Err(format!("the prefix {prefix:?} has its own meaning in XML; use another one"));
    }
    if !super::is_name(prefix) {
        return Err(format!("{prefix:?} is no prefix: write a name, without a colon"));
    }
    if uri.is_empty() || [XML, XMLNS].contains(&uri) {
        return Err(format!(
            "{uri:?} is no namespace for a prefix; write the one of the documents"
        ));
    }
    Ok(())
}

/// A namespace of one document; 0 is none.
pub(super) type Uri = u32;

const NONE: Uri = 0;
const OF_XML: Uri = 1;
const OF_XMLNS: Uri = 2;

/// The declarations in scope at a place of a document.
///
/// Each operation takes constant time for each declaration, however deep the element.
#[derive(Debug)]
pub(super) struct Scope<'a> {
    uris: Uris,
    bound: HashMap<&'a [u8], Uri>,
    undo: Vec<(&'a [u8], Option<Uri>)>,
}

/// The namespaces of a document.
#[derive(Debug)]
pub(super) struct Uris {
    ids: HashMap<Vec<u8>, Uri>,
    texts: Vec<Vec<u8>>,
}

impl Uris {
    pub(super) fn text(&self, uri: Uri) -> &[u8] {
        let text = usize::try_from(uri).ok().and_then(|uri| self.texts.get(uri));
        text.map_or(b"", Vec::as_slice)
    }

    fn id(&mut self, uri: &[u8]) -> Option<Uri> {
        if let Some(id) = self.ids.get(uri) {
            return Some(*id);
        }
        let id = Uri::try_from(self.texts.len()).ok()?;
        self.texts.push(uri.to_vec());
        self.ids.insert(uri.to_vec(), id);
        Some(id)
    }
}

/// The effect of a declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Declared {
    New,
    /// None: the same declaration is already in scope.
    Known,
}

impl<'a> Scope<'a> {
    pub(super) fn new() -> Self {
        let mut uris = Uris { ids: HashMap::new(), texts: Vec::new() };
        for uri in ["", XML, XMLNS] {
            let _known = uris.id(uri.as_bytes());
        }
        let bound = HashMap::from([(&b""[..], NONE), (&b"xml"[..], OF_XML)]);
        Self { uris, bound, undo: Vec::new() }
    }

    /// The namespace of a prefix. The empty prefix has the default namespace.
    pub(super) fn resolve(&self, prefix: &[u8]) -> Option<Uri> {
        self.bound.get(prefix).copied()
    }

    /// Declares a prefix. `None`: Namespaces in XML forbids it.
    pub(super) fn declare(&mut self, prefix: &'a [u8], uri: &[u8]) -> Option<Declared> {
        let uri = self.uris.id(uri)?;
        let allowed = match uri {
            OF_XMLNS => false,
            OF_XML => prefix == b"xml",
            NONE => prefix.is_empty(),
            _ => !matches!(prefix, b"xml" | b"xmlns"),
        };
        if !allowed {
            return None;
        }
        if self.resolve(prefix) == Some(uri) {
            return Some(Declared::Known);
        }
        self.undo.push((prefix, self.bound.insert(prefix, uri)));
        Some(Declared::New)
    }

    /// The number of declarations, for `leave`.
    pub(super) fn mark(&self) -> usize {
        self.undo.len()
    }

    /// Removes the declarations since the mark.
    pub(super) fn leave(&mut self, mark: usize) {
        for (prefix, before) in self.undo.drain(mark.min(self.undo.len())..).rev() {
            match before {
                Some(uri) => self.bound.insert(prefix, uri),
                None => self.bound.remove(prefix),
            };
        }
    }

    pub(super) fn into_uris(self) -> Uris {
        self.uris
    }
}
