//! Form pairs, of a query or of a body: decoded bytes, sorted by name.
//!
//! The order of different names does not matter. The order of equal names matters, and the order of names that some API reads
//! as one ([`arrange`]). Values are compared as decoded bytes and never repaired, so two different broken UTF-8 sequences stay
//! different. A text with a `%` that begins no escape is not read (`None`) and is compared byte by byte, because upstreams
//! disagree on it.

use std::borrow::Cow;

use super::json::write_length;

/// A pair as decoded.
pub(crate) type Pair<'a> = (Cow<'a, [u8]>, Cow<'a, [u8]>);

/// Reads pairs in their order. `None`: a `%` that begins no escape.
pub(crate) fn pairs(text: &[u8]) -> Option<Vec<Pair<'_>>> {
    let mut pairs = Vec::new();
    for piece in text.split(|b| *b == b'&').filter(|piece| !piece.is_empty()) {
        let mut halves = piece.splitn(2, |b| *b == b'=');
        let name = decode(halves.next().unwrap_or_default())?;
        let value = decode(halves.next().unwrap_or_default())?;
        pairs.push((name, value));
    }
    Some(pairs)
}

fn decode(text: &[u8]) -> Option<Cow<'_, [u8]>> {
    if !text.iter().any(|byte| matches!(byte, b'%' | b'+')) {
        return Some(Cow::Borrowed(text));
    }
    let mut decoded = Vec::with_capacity(text.len());
    decode_into(text, &mut decoded)?;
    Some(Cow::Owned(decoded))
}

fn decode_into(text: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => digit(*bytes.next()?)? << 4 | digit(*bytes.next()?)?,
            b'+' => b' ',
            plain => *plain,
        });
    }
    Some(())
}

fn digit(letter: u8) -> Option<u8> {
    match letter {
        b'0'..=b'9' => Some(letter - b'0'),
        b'a'..=b'f' => Some(letter - b'a' + 10),
        b'A'..=b'F' => Some(letter - b'A' + 10),
        _ => None,
    }
}

/// Which pairs count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection {
    /// Only the pairs with these names, if there are any.
    pub(crate) only: Vec<String>,
    /// Without the pairs with these names.
    pub(crate) ignore: Vec<String>,
}

/// The result of a selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    /// All but what is ignored.
    Whole,
    /// The named pairs.
    Picked,
}

/// Writes the pairs that count in canonical order. `None`: the text cannot be read, and nothing was written.
///
/// If `only` matches nothing, all pairs count, so that an unexpected text is compared and not ignored.
pub(crate) fn write(text: &[u8], selection: &Selection, out: &mut Vec<u8>) -> Option<Selected> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut pairs = Vec::with_capacity(text.len() / 32 + 1);
    for piece in text.split(|b| *b == b'&').filter(|piece| !piece.is_empty()) {
        let start = decoded.len();
        let equals = piece.iter().position(|b| *b == b'=').unwrap_or(piece.len());
        let (name, value) = piece.split_at_checked(equals)?;
        decode_into(name, &mut decoded)?;
        let name_end = decoded.len();
        decode_into(value.get(1..).unwrap_or_default(), &mut decoded)?;
        pairs.push(PairSpan { start, name_end, end: decoded.len() });
    }
    let name = |span: &PairSpan| decoded.get(span.start..span.name_end).unwrap_or_default();
    let named = |names: &[String], span: &PairSpan| {
        !names.is_empty() && names.iter().any(|known| known.as_bytes() == name(span))
    };
    let picked = pairs.iter().any(|span| named(&selection.only, span));
    pairs.retain(|span| {
        (!picked || named(&selection.only, span)) && !named(&selection.ignore, span)
    });
    arrange(&mut pairs, name, |span| span.start);
    out.reserve(decoded.len() + 2 * pairs.len() + 8);
    write_length(out, pairs.len());
    for PairSpan { start, name_end, end } in &pairs {
        for half in [decoded.get(*start..*name_end), decoded.get(*name_end..*end)] {
            let half = half.unwrap_or_default();
            write_length(out, half.len());
            out.extend_from_slice(half);
        }
    }
    Some(if picked { Selected::Picked } else { Selected::Whole })
}

/// Sorts fields by their names if their order has no meaning. `start` is the original place of a field.
///
/// Equal names keep their order. So do names that some API reads as one place or as a list: `a[][x]` and `a[][y]` fill the
/// elements of a list one after the other, `a` replaces `a[x]`, and some APIs read `a.b` as `A_B`.
pub(crate) fn arrange<'n, T>(
    fields: &mut [T],
    name: impl Fn(&T) -> &'n [u8],
    start: impl Fn(&T) -> usize,
) {
    fields.sort_unstable_by(|a, b| name(a).cmp(name(b)).then(start(a).cmp(&start(b))));
    let odd = |byte: &u8| matches!(byte, b'[' | b'.' | b' ' | b'\\') || byte.is_ascii_uppercase();
    if !fields.iter().any(|field| name(field).iter().any(odd)) {
        return;
    }
    fields.sort_by(|a, b| root(name(a)).cmp(root(name(b))));
    for alike in fields.chunk_by_mut(|a, b| root(name(a)).eq(root(name(b)))) {
        let meet = |pair: &[T]| matches!(pair, [a, b] if meet(name(a), name(b)));
        if alike.windows(2).any(meet) {
            alike.sort_unstable_by_key(&start);
        }
    }
}

/// The root of a name: the part before a bracket, without the characters that APIs ignore.
fn root(name: &[u8]) -> impl Iterator<Item = u8> {
    let letters = name.iter().take_while(|byte| **byte != b'[').filter(|byte| **byte != b'\\');
    letters.map(|byte| if matches!(byte, b'.' | b' ') { b'_' } else { byte.to_ascii_lowercase() })
}

/// Whether the order of two names of one root may matter. It is enough to compare neighbours, because sorting puts the
/// names of one root next to each other.
fn meet(one: &[u8], other: &[u8]) -> bool {
    let plain = |name: &'_ [u8]| name.iter().take_while(|byte| **byte != b'[').count();
    let listed = |name: &[u8]| name.windows(2).any(|pair| pair == b"[]");
    let apart = one.get(..plain(one)) != other.get(..plain(other));
    one != other && (apart || other.starts_with(one) || listed(one) || listed(other))
}

/// Where a pair stands in the decoded text.
struct PairSpan {
    start: usize,
    name_end: usize,
    end: usize,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn form(text: &[u8]) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        let ignore = vec!["ts".to_owned()];
        write(text, &Selection { only: Vec::new(), ignore }, &mut out).map(|_| out)
    }

    #[test]
    fn decoded_pairs_decide() {
        assert_eq!(form(b"a=x+y&b=2"), form(b"b=%32&&a=x%20y&ts=5"));
        assert_eq!(form(b""), form(b"ts=1"));
        for (a, b) in [
            (&b"a=1&a=2"[..], &b"a=2&a=1"[..]),
            (b"a=1%26b=2", b"a=1&b=2"),
            (b"a=%FF", b"a=%FE"),
            (b"a=%FF", b"a=%EF%BF%BD"),
            (b"ab=c", b"a=bc"),
            (b"a=+", b"a=%2B"),
        ] {
            assert_ne!(form(a), form(b), "{a:?}");
        }
        assert_eq!(form(b"a=%zz"), None);
        assert_eq!(form(b"a=%4"), None);
    }

    #[test]
    fn the_order_of_names_that_an_api_may_read_as_one_counts() {
        let same = |a: &str, b: &str| form(a.as_bytes()) == form(b.as_bytes());
        for (a, b) in [
            // The elements of a list, filled one after the other.
            ("i[][s]=A&i[][q]=1&i[][s]=B&i[][q]=2", "i[][s]=A&i[][s]=B&i[][q]=1&i[][q]=2"),
            ("i%5B%5D%5Bs%5D=A&i[][q]=1", "i[][q]=1&i[][s]=A"),
            ("i[]=1&i[0]=2", "i[0]=2&i[]=1"),
            // The later one takes the place of the earlier.
            ("a=1&a[b]=2", "a[b]=2&a=1"),
            ("a[b]=1&z=1&a[b][c]=2", "a[b][c]=2&z=1&a[b]=1"),
            ("a.b=1&a_b=2", "a_b=2&a.b=1"),
            ("a b=1&a_b=2", "a_b=2&a b=1"),
            ("Id=1&id=2", "id=2&Id=1"),
        ] {
            assert!(!same(a, b), "{a} and {b}");
            let beside = |text: &str| format!("y=1&{text}&b=2");
            assert!(!same(&beside(a), &beside(b)), "{a} and {b}, among others");
            assert!(same(&format!("b=2&{a}"), &format!("{a}&b=2")), "{a} beside another name");
        }
        for (a, b) in [
            ("a[b]=1&a[c]=2", "a[c]=2&a[b]=1"),
            ("a[1]=x&a[10]=y&a[2]=z", "a[2]=z&a[10]=y&a[1]=x"),
            ("i[]=1&j=1&i[]=2", "j=1&i[]=1&i[]=2"),
            ("a.b=1&a.c=2&A=3", "A=3&a.c=2&a.b=1"),
            ("aB=1&aC=2", "aC=2&aB=1"),
        ] {
            assert!(same(a, b), "{a} and {b}");
        }
    }

    #[test]
    fn only_the_named_fields_count_where_there_are_any() {
        let selection =
            Selection { only: vec!["id".to_owned(), "n".to_owned()], ignore: vec!["n".to_owned()] };
        let form = |text: &[u8]| {
            let mut out = Vec::new();
            write(text, &selection, &mut out).map(|kept| (kept, out))
        };
        assert_eq!(form(b"id=1&at=1"), form(b"at=2&id=1&n=1"));
        assert_ne!(form(b"id=1&at=1"), form(b"id=2&at=1"));
        // Named, and ignored: nothing is left, which is not the same as nothing that is named.
        assert_eq!(form(b"n=1&at=1"), form(b"n=2"));
        assert_ne!(form(b"n=1"), form(b""));
        assert_ne!(form(b"at=1"), form(b"at=2"));
        assert_ne!(form(b"at=1"), form(b"n=1&at=1"));
    }

    fn spelt(text: &[u8], hex: bool) -> String {
        let letter = |byte: &u8| match byte {
            b' ' if hex => "+".to_owned(),
            b'a'..=b'z' if !hex => char::from(*byte).to_string(),
            _ if hex => format!("%{byte:02x}"),
            _ => format!("%{byte:02X}"),
        };
        text.iter().map(letter).collect()
    }

    fn spelt_pairs(pairs: &[(Vec<u8>, Vec<u8>)], hex: bool) -> Vec<u8> {
        let pair = |(name, value): &(Vec<u8>, Vec<u8>)| {
            let equals = if value.is_empty() && hex && !name.is_empty() { "" } else { "=" };
            format!("{}{equals}{}", spelt(name, hex), spelt(value, hex))
        };
        let glue = if hex { "&&" } else { "&" };
        pairs.iter().map(pair).collect::<Vec<_>>().join(glue).into_bytes()
    }

    proptest! {
        #[test]
        fn spelling_and_order_of_names_do_not_matter_and_content_does(
            named in prop::collection::btree_map(
                prop::collection::vec(any::<u8>(), 0..4),
                prop::collection::vec(prop::collection::vec(any::<u8>(), 0..6), 1..4),
                0..6,
            ),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let pairs: Vec<(Vec<u8>, Vec<u8>)> = named
                .iter()
                .flat_map(|(name, values)| values.iter().map(|v| (name.clone(), v.clone())))
                .collect();
            // Names backwards, the values of each in their order.
            let turned: Vec<(Vec<u8>, Vec<u8>)> = named
                .iter()
                .rev()
                .flat_map(|(name, values)| values.iter().map(|v| (name.clone(), v.clone())))
                .collect();
            let plain = form(&spelt_pairs(&pairs, false));
            prop_assert!(plain.is_some());
            // Names that may be one are another test's.
            let roots = named.keys().map(|name| root(name).collect::<Vec<_>>());
            prop_assume!(roots.collect::<std::collections::BTreeSet<_>>().len() == named.len());
            prop_assert_eq!(&plain, &form(&spelt_pairs(&turned, true)));
            if !pairs.is_empty() {
                let mut other = pairs.clone();
                let ignored = |(name, _): &(Vec<u8>, Vec<u8>)| name.as_slice() == b"ts";
                let pair = at.get_mut(&mut other);
                prop_assume!(!ignored(pair));
                pair.1.push(byte);
                prop_assert_ne!(&plain, &form(&spelt_pairs(&other, false)));
            }
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..60), text in "[a%+=&0-9]{0,30}") {
            let _forms = (form(&bytes), form(text.as_bytes()));
        }
    }
}
