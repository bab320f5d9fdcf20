//! What two XML texts must have in common to be one document, and what tells them apart.

use proptest::prelude::*;

use super::*;

fn form_of(kind: &str, body: &[u8], selection: &Selection) -> Option<String> {
    let mut out = Vec::new();
    let kind = ParameterizedValue::parse(kind.as_bytes()).unwrap();
    write(body, &kind, selection, &mut out).map(|_| String::from_utf8(out).unwrap())
}

fn form(text: &str) -> Option<String> {
    form_of("text/xml", text.as_bytes(), &Selection::default())
}

fn paths(texts: &[&str]) -> Vec<Path> {
    let given = [("p", "urn:p"), ("s", "http://schemas.xmlsoap.org/soap/envelope/")];
    let given = given.map(|(prefix, uri)| (prefix.to_owned(), uri.to_owned())).into();
    texts.iter().map(|text| Path::parse(text, &given).unwrap()).collect()
}

/// What is left of a document where some of it is ignored.
fn without(ignore: &[&str], text: &str) -> String {
    let selection = Selection { ignore: paths(ignore), only: Vec::new() };
    form_of("text/xml", text.as_bytes(), &selection).expect(text)
}

/// The same where only some of it counts. `None`: nothing of that is there.
fn only(only: &[&str], ignore: &[&str], text: &str) -> Option<String> {
    let selection = Selection { ignore: paths(ignore), only: paths(only) };
    let mut out = Vec::new();
    let kind = ParameterizedValue::parse(b"text/xml").unwrap();
    let kept = write(text.as_bytes(), &kind, &selection, &mut out).expect(text);
    let out = String::from_utf8(out).unwrap();
    if kept == Selected::Whole {
        assert_eq!(out, without(ignore, text));
    }
    (kept == Selected::Picked).then_some(out)
}

#[test]
fn the_form_is_canonical_xml_and_its_own_form() {
    for (text, canonical) in [
        ("<a/>", "<a></a>"),
        (
            "<?xml version='1.0' encoding='utf-8'?>\n<!-- c --><a  b = '2'\n a=\"1\" ><!-- c --></a >\n",
            "<a a=\"1\" b=\"2\"></a>",
        ),
        ("<a>\n  <b> </b>\n\t<c>x</c>\r\n</a>", "<a><b> </b><c>x</c></a>"),
        ("<a><![CDATA[<&]]>&gt;&#x41;&#66;]]&gt;</a>", "<a>&lt;&amp;&gt;AB]]&gt;</a>"),
        ("<a b='&quot;&#9;\t\r\n\n&apos;'>\"\r\n\r'</a>", "<a b=\"&quot;&#x9;   '\">\"\n\n'</a>"),
        ("<a>x <b/> <c/></a>", "<a>x <b></b> <c></c></a>"),
        (
            "<a xml:space='preserve'> <b/> <c xml:space='default'> <d/> </c></a>",
            "<a xml:space=\"preserve\"> <b></b> <c xml:space=\"default\"><d></d></c></a>",
        ),
        ("<a>&#32;<b/> <![CDATA[\n]]></a>", "<a>&#x20;<b></b>&#x20;&#xA;</a>"),
        ("<a>x<!-- 1 --><!-- 2 -->y</a>", "<a>x<!---->y</a>"),
        ("<?p?><a><?q  r\r\n?></a><?s t?>", "<?p?><a><?q r\n?></a><?s t?>"),
        (
            "<a xmlns='' xmlns:p='u'><p:b xmlns:p='u' p:c=''/><d xmlns='u'><e xmlns='u'/></d></a>",
            "<a xmlns:p=\"u\"><p:b p:c=\"\"></p:b><d xmlns=\"u\"><e></e></d></a>",
        ),
        ("<\u{e9}l>\u{1f600}&#x1F600;</\u{e9}l>", "<\u{e9}l>\u{1f600}\u{1f600}</\u{e9}l>"),
    ] {
        assert_eq!(form(text).as_deref(), Some(canonical), "{text}");
        assert_eq!(form(canonical).as_deref(), Some(canonical), "{text}");
    }
}

#[test]
fn different_documents_have_different_forms() {
    let texts = [
        "<a/>",
        "<b/>",
        "<a> </a>",
        "<a>  </a>",
        "<a>\n</a>",
        "<a b=''/>",
        "<a b=' '/>",
        "<a b='&#10;'/>",
        "<a c=''/>",
        "<a b='' c=''/>",
        "<a b=' c='/>",
        "<a>b</a>",
        "<a><b/></a>",
        "<a><b/><b/></a>",
        "<a><b><b/></b></a>",
        "<a>&lt;b/></a>",
        "<a>&amp;lt;b/></a>",
        "<a>x<b/></a>",
        "<a><b/>x</a>",
        "<a>x <b/></a>",
        "<a>&#32;<b/></a>",
        "<a xml:space='preserve'> <b/></a>",
        "<a xml:space='preserve'><b/></a>",
        "<a><?b?></a>",
        "<a><?b c?></a>",
        "<?b?><a/>",
        "<a/><?b?>",
        "<a xmlns='u'/>",
        "<a xmlns='v'/>",
        "<a xmlns:p='u'/>",
        "<p:a xmlns:p='u'/>",
        "<q:a xmlns:q='u'/>",
        "<a xmlns:p='u' xmlns:q='v' p:b=''/>",
        "<a xmlns:p='u' xmlns:q='v' q:b=''/>",
        "<a xmlns:p='u'><b xmlns:p='v'/></a>",
        "<a xmlns='u'><b xmlns=''/></a>",
        "<a xmlns='u'><b/></a>",
        "<a>xy</a>",
        "<a>x<!-- -->y</a>",
        "<a>e\u{301}</a>",
        "<a>\u{e9}</a>",
        "<A/>",
    ];
    let forms = texts.map(|text| form(text).expect(text));
    for (i, a) in forms.iter().enumerate() {
        for (j, b) in forms.iter().enumerate() {
            assert_eq!(a == b, i == j, "{} {}", texts[i], texts[j]);
        }
    }
}

const MALFORMED: &[&str] = &[
    "",
    " ",
    "x",
    "<",
    "<a",
    "<a>",
    "<a><",
    "<a></",
    "<a></a",
    "<a></b>",
    "<a></A>",
    "</a>",
    "<a/><b/>",
    "<a/>x",
    "x<a/>",
    "<a/>&#32;",
    "<a/><![CDATA[]]>",
    " <?xml version='1.0'?><a/>",
    "<?xml\u{c}version='1.0'?><a/>",
    "<a><?xml version='1.0'?></a>",
    "<a><?XML?></a>",
    "<a><?b:c?></a>",
    "<a><?b</a>",
    "<a><??></a>",
    "<a b/>",
    "<a b=c/>",
    "<a b=''c=''/>",
    "<a b='<'/>",
    "<a b='&'/>",
    "<a b='/>",
    "<a b='' b=''/>",
    "<a / >",
    "< a/>",
    "<a></ a>",
    "<a></a b=''>",
    "<1a/>",
    "<-a/>",
    "<a:/>",
    "<:a/>",
    "<p:a/>",
    "<a p:b=''/>",
    "<a xmlns:p=''/>",
    "<a xmlns:p='u' xmlns:p='u'/>",
    "<a xmlns:p='u' xmlns:q='u' p:b='' q:b=''/>",
    "<a><b xmlns:p='u'/><p:c/></a>",
    "<a xmlns:xml='u'/>",
    "<a xmlns:xmlns='u'/>",
    "<a xmlns:p='http://www.w3.org/XML/1998/namespace'/>",
    "<a xmlns='http://www.w3.org/2000/xmlns/'/>",
    "<xmlns:a/>",
    "<p:q:a xmlns:p='u'/>",
    "<a>&b;</a>",
    "<a>&amp</a>",
    "<a>&</a>",
    "<a>&#;</a>",
    "<a>&#x;</a>",
    "<a>&#0;</a>",
    "<a>&#8;</a>",
    "<a>&#xD800;</a>",
    "<a>&#xFFFE;</a>",
    "<a>&#x110000;</a>",
    "<a>&#99999999999999999999;</a>",
    "<a>&#X41;</a>",
    "<a>&#-1;</a>",
    "<a>]]></a>",
    "<a><![CDATA[</a>",
    "<a><!-- -- --></a>",
    "<a><!-- ---></a>",
    "<a><!-></a>",
    "<a><!b></a>",
    "<a>\u{1}</a>",
    "<a>\u{c}</a>",
    "<a\u{c}/>",
    "<a>\u{ffff}</a>",
    "<a>\0</a>",
    "<!DOCTYPE a><a/>",
    "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>",
    "<?xml version='1.0'?><!DOCTYPE a SYSTEM 'file:///etc/passwd'><a/>",
    "<a><!DOCTYPE a></a>",
    "\u{feff}\u{feff}<a/>",
];

#[test]
fn what_is_not_well_formed_is_not_read() {
    let many = |count: usize| format!("{}{}", "<a>".repeat(count), "</a>".repeat(count));
    assert!(form(&many(128)).is_some());
    let deep = [many(129), many(200_000), "<a>".repeat(500_000)];
    for text in MALFORMED.iter().copied().chain(deep.iter().map(String::as_str)) {
        assert_eq!(form(text), None, "{}", text.get(..60.min(text.len())).unwrap_or(text));
    }
}

#[test]
fn parameters_of_the_type_count_but_for_the_charset() {
    let soap = |kind: &str| form_of(kind, b"<a/>", &Selection::default()).unwrap();
    let plain = soap("application/soap+xml; action=\"urn:a\"");
    assert_eq!(plain, soap("application/soap+xml; charset=utf-8; Action=\"urn:a\""));
    assert_ne!(plain, soap("application/soap+xml; action=\"urn:b\""));
    assert_ne!(plain, soap("application/soap+xml"));
}

#[test]
fn ignored_elements_are_named_by_path_and_namespace() {
    let envelope = |head: &str| {
        format!(
            "<e:Envelope xmlns:e='http://schemas.xmlsoap.org/soap/envelope/' xmlns:t='urn:p'><e:Header>{head}</e:Header><t:Trace>1</t:Trace></e:Envelope>"
        )
    };
    let bare = envelope("");
    let traced = envelope("<t:Trace>1</t:Trace>\n<x xmlns='urn:p'><Trace/></x>");
    let other = "<e:Envelope xmlns:e=\"http://schemas.xmlsoap.org/soap/envelope/\" xmlns:t=\"urn:p\"><e:Header><x xmlns=\"urn:p\"><Trace></Trace></x></e:Header><t:Trace>1</t:Trace></e:Envelope>";
    assert_eq!(without(&["/s:Envelope/s:Header/p:Trace"], &traced), other);
    assert_eq!(without(&["/soap:Envelope/soap:Header/*"], &traced), form(&bare).unwrap());
    assert_eq!(without(&["//soap:Header//p:Trace", "//p:x"], &traced), form(&bare).unwrap());
    assert_eq!(
        without(&["//Trace", "/s:Header", "/*/p:x", "//wsse:Trace"], &traced),
        form(&traced).unwrap()
    );
    assert!(!without(&["//p:Trace"], &traced).contains("Trace"));
    assert!(!without(&["//*:Trace"], &traced).contains("Trace"));
    assert!(!without(&["//p:*"], &traced).contains("Trace"));
    assert_eq!(without(&["/*"], &traced), "");
    assert_eq!(without(&["//b"], "<a>x<b>y</b>z<!-- --><b/>w</a>"), "<a>xz<!---->w</a>");
    assert_eq!(
        without(&["/a/a/b"], "<a><a><b/><a><b/></a></a></a>"),
        "<a><a><a><b></b></a></a></a>"
    );
    assert_eq!(
        without(&["/a//b//c"], "<a><c/><b><x><c/></x><c/></b></a>"),
        "<a><c></c><b><x></x></b></a>"
    );
}

#[test]
fn ignored_attributes_are_named_by_path_and_namespace() {
    let text = "<a id='1' xmlns:p='urn:p' p:id='2'><b id='3' p:id='4' t='5'/></a>";
    assert_eq!(
        without(&["//@id"], text),
        form("<a xmlns:p='urn:p' p:id='2'><b p:id='4' t='5'/></a>").unwrap()
    );
    assert_eq!(
        without(&["//@p:id"], text),
        form("<a xmlns:p='urn:p' id='1'><b id='3' t='5'/></a>").unwrap()
    );
    assert_eq!(
        without(&["/a/@id"], text),
        form("<a xmlns:p='urn:p' p:id='2'><b id='3' p:id='4' t='5'/></a>").unwrap()
    );
    assert_eq!(
        without(&["/a/*/@*"], text),
        form("<a xmlns:p='urn:p' id='1' p:id='2'><b/></a>").unwrap()
    );
    assert_eq!(
        without(&["/a//@t", "/b/@id"], text),
        form("<a xmlns:p='urn:p' id='1' p:id='2'><b id='3' p:id='4'/></a>").unwrap()
    );
}

#[test]
fn selected_parts_count_alone_where_there_are_any() {
    let text =
        "<a xmlns:p='urn:p' t='1'>\n<b><c n='1' m='2'>x</c> y</b><?i?><d><c/></d><e>z</e></a>";
    for (paths, ignore, left) in [
        (&["//c"][..], &[][..], "<b><c m=\"2\" n=\"1\">x</c></b><d><c></c></d>"),
        (&["/a/b/c/@n"], &[], "<b><c n=\"1\"></c></b>"),
        (&["/a/b/c/@n"], &["//@n"], ""),
        (&["/a/b"], &["//c"], "<b> y</b>"),
        (&["/a/d"], &["/a/d"], ""),
        (&["/a/d", "//e"], &["/a/d"], "<e>z</e>"),
    ] {
        let whole = format!("<a xmlns:p=\"urn:p\">{left}</a>");
        let expected = if left.is_empty() { "" } else { &whole };
        assert_eq!(only(paths, ignore, text).as_deref(), Some(expected), "{paths:?}");
    }
    assert_eq!(only(&["/a"], &[], text), form(text));
    assert_eq!(only(&["//f", "//p:c", "/b"], &["//e"], text), None);
    assert_ne!(only(&["//c"], &[], text), only(&["//c"], &[], &text.replace("urn:p", "urn:q")));
}

#[test]
fn paths_that_are_not_read_are_refused() {
    for wrong in [
        "",
        "a",
        "/",
        "//",
        "/a/",
        "///a",
        "/a[1]",
        "/a/b[@c]",
        "/a/text()",
        "/a/..",
        "/a|/b",
        "a/b",
        "/@a",
        "/a/@b/c",
        "/a b",
        "/:a",
        "/a:",
        "/soap:a:b",
        "/*:*",
        "/1",
        "/a/@",
        "//@",
        "/child::a",
        "/*a",
        "/$a",
    ] {
        assert!(Path::parse(wrong, &Given::new()).unwrap_err().contains("write steps"), "{wrong}");
    }
    assert!(
        Path::parse(&"/a".repeat(33), &Given::new()).is_err()
            && Path::parse(&"/a".repeat(32), &Given::new()).is_ok()
    );
    let unknown = Path::parse("//x:a", &Given::new()).unwrap_err();
    assert_eq!(
        unknown,
        "the prefix \"x\" is not known; give its namespace: xml_namespaces = { x = \"...\" }"
    );
    let spelled = |text: &str, prefix: &str| {
        let given = Given::from([(prefix.to_owned(), "urn:x".to_owned())]);
        Path::parse(text, &given).unwrap().spelled()
    };
    assert_eq!(spelled("//a/p:b/@*", "p"), "//{}a/{urn:x}b/@{*}*");
    assert_eq!(
        spelled("/x:a", "x"),
        spelled("/soap:a", "soap"),
        "what is given goes before what is known"
    );
    for (prefix, uri) in [
        ("xml", "u"),
        ("xmlns", "u"),
        ("a:b", "u"),
        ("", "u"),
        ("a", ""),
        ("a", "http://www.w3.org/2000/xmlns/"),
    ] {
        assert!(check(prefix, uri).is_err(), "{prefix} {uri}");
    }
    assert_eq!(check("s", "urn:s"), Ok(()));
}

/// Were any of these to take more than linear time, the test would not end for hours.
#[test]
fn hostile_documents_take_linear_time() {
    let count = 100_000;
    let numbered =
        |text: &str| (0..count).map(|n| text.replace('#', &n.to_string())).collect::<String>();
    let deep = |inner: &str| {
        let open =
            (0..126).map(|n| format!("<a xmlns:p{n}='u{n}' xmlns='d{n}'>")).collect::<String>();
        format!("<a {}>{open}{inner}{}</a>", numbered(" xmlns:q#='v#'"), "</a>".repeat(126))
    };
    let long = format!("<a xmlns:p='{}' {}/>", "u".repeat(1_000_000), numbered(" p:a#=''"));
    for text in [
        deep(&"<b xmlns:p0='w' p0:c=''/>".repeat(count)),
        format!(
            "<a {}>{}</a>",
            numbered(" xmlns:q#='v#'"),
            numbered("<q#:b q#:c='' xmlns:q#='w'/>")
        ),
        long,
        format!("<a>{}</a>", "<!---->x".repeat(count)),
        format!("<a>{}</a>", "<![CDATA[]]>".repeat(count)),
        format!("<a>{}</a>", "&amp;\r".repeat(count)),
        format!("<a b='{}'/>", "&#10;\t".repeat(count)),
        format!("<a>{}</a>", "<b><c/>&#32;</b>".repeat(count)),
    ] {
        assert!(form(&text).is_some(), "{}", text.get(..60).unwrap());
    }
    for text in [
        format!("<a>{}</a>", "&".repeat(1_000_000)),
        format!("<a {}/>", "b='' ".repeat(200_000)),
        "<a b='".repeat(200_000),
        "<!--".repeat(200_000),
        format!("<a>{}", "<?b ".repeat(200_000)),
        format!("<a>{}", "<![CDATA[".repeat(100_000)),
    ] {
        assert_eq!(form(&text), None, "{}", text.get(..60).unwrap());
    }
    let paths = vec!["//*//*//*//*//*//*//*//*//*//*//*//*//x/@y"; 8];
    assert!(
        !without(&paths, &format!("<a>{}</a>", "<b><b><b c=''/></b></b>".repeat(20_000)))
            .is_empty()
    );
}

#[derive(Clone, Debug, PartialEq)]
enum Item {
    Element { name: usize, attributes: Vec<(usize, String)>, preserved: bool, items: Vec<Self> },
    Text(String),
    Instruction(String),
}

const NAMES: [&str; 5] = ["a", "b", "p:a", "q:a", "p:b"];
const DECLARED: &str = " xmlns:p='urn:p' xmlns:q=\"urn:q\"";

fn items() -> impl Strategy<Value = Item> {
    let text = "[a<&>\"' \t\n\r\u{e9}\u{1f600}\\]]{1,6}";
    let leaf = prop_oneof![
        text.prop_map(Item::Text),
        "( ?|[a-c?>][a-c?> ]{0,3})"
            .prop_filter("ends it", |t| !t.contains("?>"))
            .prop_map(|data| Item::Instruction(data.trim_start().to_owned())),
    ];
    leaf.prop_recursive(4, 30, 5, move |inner| {
        let attributes = prop::collection::vec((0..NAMES.len(), text), 0..4);
        (0..NAMES.len(), attributes, prop::bool::weighted(0.1), prop::collection::vec(inner, 0..5))
            .prop_map(|(name, mut attributes, preserved, items)| {
                attributes.sort_by_key(|(name, _)| *name);
                attributes.dedup_by_key(|(name, _)| *name);
                Item::Element { name, attributes, preserved, items }
            })
    })
}

fn documents() -> impl Strategy<Value = Item> {
    let root = prop::collection::vec(items(), 0..5).prop_map(|items| Item::Element {
        name: 0,
        attributes: Vec::new(),
        preserved: false,
        items,
    });
    root.prop_map(|mut root| {
        settle(&mut root, false);
        root
    })
}

fn is_blank(text: &str) -> bool {
    text.chars().all(|c| " \t\n\r".contains(c))
}

/// Joins texts, and leaves out blanks that mean nothing: what is left is told apart by equality.
fn settle(item: &mut Item, kept: bool) {
    let Item::Element { items, preserved, .. } = item else { return };
    let kept = kept || *preserved;
    let mut joined: Vec<Item> = Vec::new();
    for item in items.drain(..) {
        match (joined.last_mut(), item) {
            (Some(Item::Text(before)), Item::Text(text)) => before.push_str(&text),
            (_, item) => joined.push(item),
        }
    }
    let elements = joined.iter().any(|item| matches!(item, Item::Element { .. }));
    let words = joined.iter().any(|item| matches!(item, Item::Text(text) if !is_blank(text)));
    if elements && !words && !kept {
        joined.retain(|item| !matches!(item, Item::Text(_)));
    }
    joined.iter_mut().for_each(|item| settle(item, kept));
    *items = joined;
}

/// One of the spellings of a document.
struct Speller {
    random: fastrand::Rng,
    out: String,
}

impl Speller {
    fn any(&mut self, texts: &[&str]) {
        let text = texts[self.random.usize(..texts.len())];
        self.out.push_str(text);
    }

    fn reference(&mut self, letter: char) {
        let code = u32::from(letter);
        let text = if self.random.bool() { format!("&#{code};") } else { format!("&#x0{code:X};") };
        self.out.push_str(&text);
    }

    fn value(&mut self, value: &str) {
        let quote = if self.random.bool() { '"' } else { '\'' };
        self.out.push(quote);
        for letter in value.chars() {
            match letter {
                '\t' | '\n' | '\r' | '<' => self.reference(letter),
                '&' => self.any(&["&amp;", "&#38;"]),
                letter if letter == quote => self.reference(letter),
                ' ' => self.any(&[" ", "\n", "\t", "\r\n", "&#32;"]),
                letter if self.random.u8(..4) == 0 => self.reference(letter),
                letter => self.out.push(letter),
            }
        }
        self.out.push(quote);
    }

    fn text(&mut self, text: &str) {
        let cdata = self.random.u8(..4) == 0 && !text.contains("]]>") && !text.contains('\r');
        if cdata {
            self.out.push_str(&format!("<![CDATA[{text}]]>"));
            return;
        }
        for letter in text.chars() {
            match letter {
                '\r' | '<' | '&' => self.reference(letter),
                '>' => self.any(&["&gt;", "&#62;"]),
                '\n' => self.any(&["\n", "\r\n", "&#10;"]),
                letter if self.random.u8(..6) == 0 => self.reference(letter),
                letter => self.out.push(letter),
            }
        }
    }

    fn item(&mut self, item: &Item, root: bool, kept: bool) {
        let (name, attributes, preserved, items) = match item {
            Item::Text(text) => return self.text(text),
            Item::Instruction(data) => {
                self.out.push_str("<?i");
                self.any(if data.is_empty() { &["", " "] } else { &[" ", "\n "] });
                self.out.push_str(data);
                return self.out.push_str("?>");
            }
            Item::Element { name, attributes, preserved, items } => {
                (NAMES[*name], attributes, *preserved, items)
            }
        };
        self.out.push_str(&format!("<{name}"));
        if root || self.random.u8(..4) == 0 {
            self.out.push_str(DECLARED);
        }
        let mut all = attributes.clone();
        self.random.shuffle(&mut all);
        for (name, value) in all {
            self.any(&[" ", "\n\t"]);
            self.out.push_str(NAMES[name]);
            self.any(&["=", " = "]);
            self.value(&value);
        }
        if preserved {
            self.out.push_str(" xml:space='preserve'");
        }
        self.any(&["", " "]);
        if items.is_empty() && self.random.bool() {
            return self.out.push_str("/>");
        }
        self.out.push('>');
        let kept = kept || preserved;
        let elements = items.iter().any(|item| matches!(item, Item::Element { .. }));
        let words = items.iter().any(|item| matches!(item, Item::Text(_)));
        let layout = elements && !words && !kept;
        let mut text = false;
        for item in items {
            let beside = text || matches!(item, Item::Text(_));
            text = matches!(item, Item::Text(_));
            self.between(layout, !beside);
            self.item(item, false, kept);
        }
        self.between(layout, !text);
        self.out.push_str(&format!("</{name}"));
        self.any(&[">", "\n>"]);
    }

    fn between(&mut self, layout: bool, comments: bool) {
        if layout {
            self.any(&["", "\n", "  ", "\r\n\t"]);
        }
        if comments {
            self.any(&["", "", "<!-- <b> & -->"]);
        }
    }
}

fn spell(document: &Item, seed: u64) -> Vec<u8> {
    let mut speller = Speller { random: fastrand::Rng::with_seed(seed), out: String::new() };
    let encoding = speller.random.usize(..4);
    let declaration =
        ["<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n", "<?xml version='1.0'?>", "", "<!-- c -->"];
    if encoding == 0 {
        speller.any(&declaration);
    } else {
        speller.any(&declaration[1..]);
    }
    speller.item(document, true, false);
    speller.any(&["", "\n", "<!-- c -->"]);
    let marked = format!("\u{feff}{}", speller.out);
    match encoding {
        1 => marked.into_bytes(),
        2 => marked.encode_utf16().flat_map(u16::to_be_bytes).collect(),
        3 => marked.encode_utf16().flat_map(u16::to_le_bytes).collect(),
        _ => speller.out.into_bytes(),
    }
}

/// Changes the document in one place.
fn change(item: &mut Item, place: &mut usize, kind: u8) {
    if *place == 0 {
        match item {
            Item::Text(text) => text.push('x'),
            Item::Instruction(data) => data.insert(0, 'x'),
            Item::Element { name, .. } if kind == 0 => *name = (*name + 1) % NAMES.len(),
            Item::Element { attributes, .. } if kind == 1 && !attributes.is_empty() => {
                attributes[0].1.push(' ')
            }
            Item::Element { items, .. } if kind == 2 => {
                items.push(Item::Instruction("x".to_owned()))
            }
            Item::Element { items, .. } => items.insert(0, Item::Text("x".to_owned())),
        }
    }
    *place = place.wrapping_sub(1);
    if let Item::Element { items, .. } = item {
        items.iter_mut().for_each(|item| change(item, place, kind));
    }
}

fn size(item: &Item) -> usize {
    match item {
        Item::Element { items, .. } => 1 + items.iter().map(size).sum::<usize>(),
        Item::Text(_) | Item::Instruction(_) => 1,
    }
}

fn raw_form(body: &[u8]) -> Option<String> {
    form_of("text/xml", body, &Selection::default())
}

proptest! {
    #[test]
    fn spelling_does_not_matter_and_content_does(a in documents(), b in documents(), seeds in any::<[u64; 2]>()) {
        let (one, two) = (spell(&a, seeds[0]), spell(&a, seeds[1]));
        let plain = raw_form(&one);
        prop_assert!(plain.is_some(), "{}", String::from_utf8_lossy(&one));
        prop_assert_eq!(&plain, &raw_form(&two), "{}\n{}", String::from_utf8_lossy(&one), String::from_utf8_lossy(&two));
        prop_assert_eq!(&plain, &raw_form(plain.as_ref().unwrap().as_bytes()));
        prop_assert_eq!(a == b, plain == raw_form(&spell(&b, seeds[1])));
    }

    #[test]
    fn one_changed_place_changes_the_form(a in documents(), place in any::<prop::sample::Index>(), kind in 0_u8..4, seeds in any::<[u64; 2]>()) {
        let mut changed = a.clone();
        change(&mut changed, &mut place.index(size(&a)), kind);
        settle(&mut changed, false);
        prop_assert_ne!(&a, &changed);
        prop_assert_ne!(raw_form(&spell(&a, seeds[0])), raw_form(&spell(&changed, seeds[1])));
    }
}
