//! Which JSON texts have one canonical form, and which must not.

use std::cell::Cell;

use proptest::prelude::*;

use super::super::Tree;
use super::*;

thread_local! {
    /// See [`super::work`].
    pub(super) static WORK: Cell<usize> = const { Cell::new(0) };
}

fn canonical(text: &str) -> Option<Vec<u8>> {
    super::canonical(text.as_bytes())
}

fn same(a: &str, b: &str) -> bool {
    let (a, b) = (canonical(a).expect(a), canonical(b).expect(b));
    a == b
}

#[test]
fn c05_numbers_compare_by_exact_decimal_value() {
    for one in ["1", "1.0", "1e0", "10e-1", "0.1e1", "1E+0", "100e-2", "0.01e00002"] {
        assert!(same("1", one), "{one}");
    }
    assert!(same("-0", "0") && same("0e99999999999999999999", "0.000") && same("0.1", "0.10"));
    for (a, b) in [
        ("9007199254740993", "9007199254740992"),
        ("1", "-1"),
        ("1e400", "1e401"),
        ("0.1", "0.1000000000000000055511151231257827"),
        ("1234567890123456789012345678901234567890", "1234567890123456789012345678901234567891"),
        ("1e9223372036854775807", "1e9223372036854775806"),
        ("12", "1e2"),
    ] {
        assert!(!same(a, b), "{a} {b}");
    }
    assert!(same("1e400", "10e399"));
    for far in ["1e999999999999999999999", "1e-999999999999999999999", "10e9223372036854775807"] {
        assert_eq!(canonical(far), None, "{far}");
    }
}

#[test]
fn c06_what_parsers_read_differently_is_not_read() {
    for text in [
        r#"{"a":1,"a":2}"#,
        r#"{"a":1,"\u0061":2}"#,
        r#""\ud800""#,
        r#""\udc00""#,
        r#""\ud800\u0041""#,
        "\u{feff}{}",
        "{oops",
        "[1,]",
        "{\"a\":1,}",
        "01",
        "-",
        "1.",
        ".5",
        "1e",
        "+1",
        "nul",
        "\"\t\"",
        "\"a",
        "[",
        "1 2",
        "",
        r#""\x""#,
        r#""\u12g4""#,
        "NaN",
    ] {
        assert_eq!(canonical(text), None, "{text}");
    }
    assert!(super::canonical(b"\"\xff\"").is_none());
    assert!(same(r#""\u0061\/\ud83d\ude00""#, "\"a/😀\""));
    assert!(!same("\"\u{e9}\"", "\"e\u{301}\""));
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(canonical(&nested(DEPTH_MAX)).is_some());
    assert_eq!(canonical(&nested(DEPTH_MAX + 1)), None);
    assert_eq!(canonical(&nested(1_000_000)), None);
}

#[test]
fn a_text_has_one_spelling() {
    for (text, wanted) in [
        (" [ 1 ,\t2 ] \n", "[1,2]"),
        (r#"{"b":1,"a":[true,null,false],"":{}}"#, r#"{"":{},"a":[true,null,false],"b":1}"#),
        (
            r#"{"b":{"d":1,"c":[{"z":1,"y":2}]},"a":1}"#,
            r#"{"a":1,"b":{"c":[{"y":2,"z":1}],"d":1}}"#,
        ),
        (r#"{"a":{"c":1,"b":2}}"#, r#"{"a":{"b":2,"c":1}}"#),
        (
            r#"{"ab":1,"a":2,"abcdefgh2":3,"abcdefgh1":4,"abcdefgh":5}"#,
            r#"{"a":2,"ab":1,"abcdefgh":5,"abcdefgh1":4,"abcdefgh2":3}"#,
        ),
        (r#"{"x\u0062":{"n":1,"m":2},"\u0061":1}"#, r#"{"a":1,"xb":{"m":2,"n":1}}"#),
        (
            r#""\/\u0022\u005C\u002f\n\u000a\u001F\u007f\u00e9""#,
            "\"/\\\"\\\\/\\n\\n\\u001f\u{7f}é\"",
        ),
        ("[0,-0,0.0,-0.0e5]", "[0,0,0,0]"),
        ("[100,1e2,1E+2,0.1e3]", "[100,100,100,100]"),
        ("[1.50,15e-1,-150.0e-2]", "[1.5,1.5,-1.5]"),
        ("[0.001,1e-3,100e-5]", "[0.001,0.001,0.001]"),
        ("[1e19,1e20,100000000000000000000]", "[10000000000000000000,1e20,1e20]"),
        ("[1e-20,1e-21,0.000000000000000000001]", "[0.00000000000000000001,1e-21,1e-21]"),
        (
            "[123456789012345678901234567890,12345678901234567890.5]",
            "[12345678901234567890123456789e1,12345678901234567890.5]",
        ),
        ("[123456789012345678901]", "[123456789012345678901]"),
    ] {
        let text = canonical(text).map(|text| String::from_utf8(text).unwrap());
        assert_eq!(text.as_deref(), Some(wanted));
    }
}

#[test]
fn the_end_of_plain_text_is_found_in_every_place() {
    for filling in [b'a', 0x80, 0xff, b'!', b'#', b'[', b']', 0x20, 0x7f] {
        for stop in (0..0x20_u8).chain([b'"', b'\\']) {
            let found = |before: usize, after: usize| {
                let text = [vec![filling; before], vec![stop], vec![filling; after]];
                plain(&text.concat()) == Some(before)
            };
            let everywhere = (0..20).all(|before| (0..10).all(|after| found(before, after)));
            assert!(everywhere, "{stop} in {filling}");
        }
    }
    assert_eq!(plain(&[b'a'; 20]), None);
}

#[test]
fn c06_work_is_linear_in_the_body_however_it_is_made() {
    let nest = |open: &str, close: &str, inner: &str| {
        [&*open.repeat(DEPTH_MAX), inner, &*close.repeat(DEPTH_MAX)].concat()
    };
    let names = |count: usize, name: &dyn Fn(usize) -> String| {
        let member = |n: usize| format!("\"{}\":{n}", name(n));
        format!("{{{}}}", (0..count).rev().map(member).collect::<Vec<_>>().join(","))
    };
    let long = "x".repeat(100_000);
    let bodies = [
        // Out of order at each depth, and what is copied lies innermost.
        nest("{\"b\":0,\"a\":", "}", &format!("\"{long}\"")),
        nest("[{\"b\":0,\"a\":", "}]", "1"),
        nest("{\"b\":{},\"a\":", "}", &names(2000, &|n| format!("{n:05}"))),
        // Names that differ at their end only.
        names(1000, &|n| format!("{}{n:05}", "x".repeat(300))),
        names(20_000, &|n| format!("{n:08}")),
        "[1e20,".repeat(100) + "1" + &"]".repeat(100),
        format!("[{}1]", "0.000000000000000000010,".repeat(5000)),
        format!("[{}1]", "1e-20,".repeat(20_000)),
        format!("[1{}.0]", "0".repeat(100_000)),
        format!("[0.{}1]", "0".repeat(100_000)),
        format!("[\"{}\"]", "\\u0061".repeat(20_000)),
        format!("[{}1]", " \n1 ,".repeat(20_000)),
        "[".repeat(100_000),
        "{\"a\":".repeat(100_000),
    ];
    for body in bodies {
        WORK.set(0);
        let text = canonical(&body);
        let done = WORK.get();
        let shown: String = body.chars().take(40).collect();
        // Twice over each byte, and the comparisons of a sort: a name is compared as often as the count of names has digits.
        assert!(done <= 20 * body.len() + 1000, "{shown}: {done} for {}", body.len());
        let len = text.as_ref().map_or(0, Vec::len);
        assert!(len <= 5 * body.len(), "{shown}: {len} for {}", body.len());
    }
}

#[test]
fn parts_do_not_run_together() {
    let texts = [
        "[]",
        "{}",
        "null",
        "\"\"",
        "0",
        "false",
        "true",
        "[[]]",
        "[[],[]]",
        "[null]",
        "[\"\"]",
        r#"["a","b"]"#,
        r#"["ab"]"#,
        r#"["a",["b"]]"#,
        r#"[["a"],"b"]"#,
        r#"{"a":"b"}"#,
        r#"{"a":{"b":1}}"#,
        r#"{"a":{},"b":1}"#,
        "1",
        "\"1\"",
        "11",
        "[1,1]",
    ];
    for (i, a) in texts.iter().enumerate() {
        for (j, b) in texts.iter().enumerate() {
            assert_eq!(same(a, b), i == j, "{a} {b}");
        }
    }
}

fn documents() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        (-1000_i32..1000).prop_map(|n| serde_json::json!(f64::from(n) / 8.0)),
        any::<String>().prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
            prop::collection::btree_map(any::<String>(), inner, 0..6)
                .prop_map(|map| map.into_iter().collect::<serde_json::Value>()),
        ]
    })
}

/// Small random numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, count: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % count
    }

    fn one<'t>(&mut self, of: &[&'t str]) -> &'t str {
        of[self.below(of.len())]
    }
}

fn blank(dice: &mut Dice) -> &'static str {
    dice.one(&["", "", "", " ", "\n", "\t\r\n  "])
}

/// The same document, spelt at random: order of members, blanks, escapes, numbers.
fn respell(value: &serde_json::Value, dice: &mut Dice, out: &mut String) {
    out.push_str(blank(dice));
    match value {
        serde_json::Value::Null | serde_json::Value::Bool(_) => {
            out.push_str(&value.to_string());
        }
        serde_json::Value::Number(number) => renumber(&number.to_string(), dice, out),
        serde_json::Value::String(text) => quote(text, dice, out),
        serde_json::Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                respell(item, dice, out);
            }
            out.push(']');
        }
        serde_json::Value::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            for index in (1..members.len()).rev() {
                members.swap(index, dice.below(index + 1));
            }
            out.push('{');
            for (index, (name, item)) in members.into_iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                out.push_str(blank(dice));
                quote(name, dice, out);
                out.push_str(blank(dice));
                out.push(':');
                respell(item, dice, out);
            }
            out.push('}');
        }
    }
    out.push_str(blank(dice));
}

fn renumber(text: &str, dice: &mut Dice, out: &mut String) {
    let (digits, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let exponent: i64 = exponent.parse().unwrap();
    let zeros = dice.below(4);
    match dice.below(3) {
        0 => out.push_str(text),
        // More zeros behind the point.
        1 => out.push_str(&format!("{whole}.{fraction}{}e{exponent}", "0".repeat(zeros + 1))),
        // All digits before the point, and zeros that the exponent takes back.
        _ => {
            let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |w| ("-", w));
            let digits = format!("{whole}{fraction}");
            let digits = digits.trim_start_matches('0');
            let (digits, zeros) = if digits.is_empty() { ("0", 0) } else { (digits, zeros) };
            let power = exponent - i64::try_from(fraction.len() + zeros).unwrap();
            let e = dice.one(&["e", "E"]);
            out.push_str(&format!("{sign}{digits}{}{e}{power}", "0".repeat(zeros)));
        }
    }
}

fn quote(text: &str, dice: &mut Dice, out: &mut String) {
    let escape = |unit: u16, dice: &mut Dice| match dice.below(2) {
        0 => format!("\\u{unit:04X}"),
        _ => format!("\\u{unit:04x}"),
    };
    out.push('"');
    for letter in text.chars() {
        let plain = serde_json::Value::from(letter.to_string()).to_string();
        match dice.below(3) {
            0 => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    out.push_str(&escape(*unit, dice));
                }
            }
            1 if letter == '/' => out.push_str("\\/"),
            _ => out.push_str(plain.strip_prefix('"').unwrap().strip_suffix('"').unwrap()),
        }
    }
    out.push('"');
}

/// Changes one part of a document, whichever the dice say; whether it was reached.
fn change(value: &mut serde_json::Value, left: &mut usize) -> bool {
    if *left == 0 {
        *value = match value {
            serde_json::Value::Null => false.into(),
            serde_json::Value::Bool(truth) => (!*truth).into(),
            serde_json::Value::Number(number) => number.to_string().into(),
            serde_json::Value::String(text) => format!("{text}x").into(),
            serde_json::Value::Array(items) => {
                items.push(serde_json::Value::Null);
                return true;
            }
            serde_json::Value::Object(members) => {
                let name = "x".repeat(members.keys().map(String::len).max().unwrap_or(0) + 1);
                members.insert(name, serde_json::Value::Null);
                return true;
            }
        };
        return true;
    }
    *left -= 1;
    match value {
        serde_json::Value::Array(items) => items.iter_mut().any(|item| change(item, left)),
        serde_json::Value::Object(members) => members.values_mut().any(|v| change(v, left)),
        serde_json::Value::Null
        | serde_json::Value::Bool(_)
        | serde_json::Value::Number(_)
        | serde_json::Value::String(_) => false,
    }
}

proptest! {
    #[test]
    fn c03_spelling_does_not_matter_and_content_does(
        a in documents(),
        b in documents(),
        seed in any::<u64>(),
    ) {
        let (plain, mut dice) = (canonical(&a.to_string()), Dice(seed));
        prop_assert!(plain.is_some());
        for _ in 0..4 {
            let mut other = String::new();
            respell(&a, &mut dice, &mut other);
            prop_assert_eq!(&plain, &canonical(&other), "{}", other);
        }
        // The canonical text says the same to another reader, and is its own canonical text.
        let text = String::from_utf8(plain.clone().unwrap()).unwrap();
        prop_assert_eq!(&plain, &canonical(&text));
        let value = |text: &str| Tree::parse(text.as_bytes()).unwrap().to_value();
        prop_assert_eq!(value(&a.to_string()), serde_json::from_str::<serde_json::Value>(&text).unwrap());
        // 1 and 1.0 are two values to serde_json and one number here: compare by a form that says so.
        let mut twin = String::new();
        respell(&b, &mut dice, &mut twin);
        prop_assert_eq!(value(&a.to_string()) != value(&twin), plain != canonical(&twin));
    }

    #[test]
    fn one_change_in_any_place_changes_the_form(a in documents(), at in 0..12_usize, seed in any::<u64>()) {
        let (mut other, mut left) = (a.clone(), at);
        prop_assume!(change(&mut other, &mut left));
        let mut text = String::new();
        respell(&other, &mut Dice(seed), &mut text);
        prop_assert_ne!(canonical(&a.to_string()), canonical(&text));
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), text in r#"[\[\]{}",:0-9eE.+\\u-]{0,40}"#) {
        let _text = super::canonical(&bytes);
        let ours = canonical(&text).is_some();
        let theirs = serde_json::from_str::<serde_json::Value>(&text).map_err(|error| error.to_string());
        // What a double does not hold, and nothing else, is read here only.
        let too_large = |told: &String| told.starts_with("number out of range");
        prop_assert!(!ours || theirs.is_ok() || theirs.as_ref().is_err_and(too_large), "{text}: {theirs:?}");
    }
}
