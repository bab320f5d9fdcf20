//! Multipart bodies: the canonical form does not contain the boundary, which clients choose anew for each attempt.
//!
//! `multipart/form-data` is a form: parts are sorted by the names of their fields, and parts of one name keep their order. In
//! all other types (`related`, as SOAP with attachments; `mixed`) the order of all parts counts, and the parameters of
//! Content-Type except the boundary. All headers of a part count, as names and values whose spelling does not matter. Its
//! content counts byte by byte: neither its transfer encoding nor its own type is interpreted.
//!
//! Invariant: two different bodies never have the same canonical form. So every piece carries its length, and a body that
//! parsers are known to split differently is compared byte by byte: a boundary outside of a delimiter line, lines that end
//! in a bare LF, a missing closing delimiter, a field without a name, a header that counts twice, a boundary or a name
//! that is also given in the form of RFC 2231 (`boundary*`).
//!
//! Time is linear except for sorting: the search for the boundary never goes back.

use memchr::memmem;

use super::form::{Selected, Selection, arrange};
use super::json::write_length;
use super::parameters::{ParameterizedValue, is_token, trim};

/// Writes the canonical form; of a form only the selected fields. `None`: nothing was written.
pub(crate) fn write(
    content_type: &[u8],
    body: &[u8],
    selection: &Selection,
    out: &mut Vec<u8>,
) -> Option<Selected> {
    read(content_type, body).map(|multipart| multipart.write(selection, out))
}

fn read<'a>(content_type: &'a [u8], body: &'a [u8]) -> Option<Multipart<'a>> {
    let kind = ParameterizedValue::parse(content_type)?;
    if kind.is_continued("boundary") {
        return None;
    }
    let boundary = kind.get("boundary").filter(|boundary| is_boundary(boundary))?;
    let parts = split(boundary, body)?;
    let parts = parts.into_iter().map(Part::read).collect::<Option<Vec<_>>>()?;
    if !kind.value.eq_ignore_ascii_case(b"multipart/form-data") {
        return Some(Multipart::Ordered { kind, parts });
    }
    let names = parts.iter().map(Part::field).collect::<Option<Vec<_>>>()?;
    let mut order: Vec<usize> = (0..names.len()).collect();
    arrange(&mut order, |at| names.get(*at).map_or(&[], Vec::as_slice), |at| *at);
    let mut fields: Vec<_> = names.into_iter().zip(parts).map(Some).collect();
    let fields = order.into_iter().filter_map(|at| fields.get_mut(at)?.take()).collect();
    Some(Multipart::Form(fields))
}

enum Multipart<'a> {
    /// As [`arrange`] puts them.
    Form(Vec<(Vec<u8>, Part<'a>)>),
    Ordered {
        kind: ParameterizedValue<'a>,
        parts: Vec<Part<'a>>,
    },
}

impl Multipart<'_> {
    fn write(&self, selection: &Selection, out: &mut Vec<u8>) -> Selected {
        match self {
            Self::Form(fields) => {
                let named = |names: &[String], name: &[u8]| {
                    names.iter().any(|known| known.as_bytes() == name)
                };
                let picked = fields.iter().any(|(name, _)| named(&selection.only, name));
                let kept = |(name, _): &&(Vec<u8>, Part<'_>)| {
                    (!picked || named(&selection.only, name)) && !named(&selection.ignore, name)
                };
                write_length(out, fields.iter().filter(kept).count());
                fields.iter().filter(kept).for_each(|(_, part)| part.write(out));
                if picked { Selected::Picked } else { Selected::Whole }
            }
            Self::Ordered { kind, parts } => {
                let parameters = kind.parameters.iter().filter(|(name, _)| name != b"boundary");
                write_parameters(parameters, out);
                write_length(out, parts.len());
                parts.iter().for_each(|part| part.write(out));
                Selected::Whole
            }
        }
    }
}

/// RFC 2046, section 5.1.1.
fn is_boundary(text: &[u8]) -> bool {
    let allowed = |b: &u8| b.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(b);
    (1..=70).contains(&text.len()) && text.iter().all(allowed) && !text.ends_with(b" ")
}

/// The parts between the delimiter lines. `None`: parsers may differ on where these lines are.
fn split<'a>(boundary: &[u8], body: &'a [u8]) -> Option<Vec<&'a [u8]>> {
    let delimiter = [b"--", boundary].concat();
    let mut parts = Vec::new();
    // The start of the open part. The preamble before the first delimiter is no part.
    let mut begun = None;
    let mut closed = false;
    for at in memmem::find_iter(body, &delimiter) {
        let (before, line) = body.split_at_checked(at)?;
        if closed || !(before.is_empty() || before.ends_with(b"\r\n")) {
            return None;
        }
        if let Some(begun) = begun {
            parts.push(before.get(begun..at.checked_sub(2)?)?);
        }
        let rest = line.get(delimiter.len()..)?;
        closed = rest.starts_with(b"--");
        let rest = if closed { rest.get(2..)? } else { rest };
        let padding = rest.iter().take_while(|b| matches!(b, b' ' | b'\t')).count();
        let rest = rest.get(padding..)?;
        if !(rest.starts_with(b"\r\n") || closed && rest.is_empty()) {
            return None;
        }
        begun = Some((body.len() - rest.len()).checked_add(2)?);
    }
    closed.then_some(parts)
}

#[derive(Debug)]
struct Part<'a> {
    /// Sorted by their names, which are in lower case; unfolded.
    headers: Vec<(Vec<u8>, Vec<u8>)>,
    content: &'a [u8],
}

impl<'a> Part<'a> {
    fn read(part: &'a [u8]) -> Option<Self> {
        if let Some(content) = part.strip_prefix(b"\r\n") {
            return Some(Self { headers: Vec::new(), content });
        }
        let end = memmem::find(part, b"\r\n\r\n")?;
        let content = part.get(end + 4..)?;
        let mut headers: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for line in lines(part.get(..end)?) {
            if line.iter().any(|b| matches!(b, b'\r' | b'\n' | 0)) {
                return None;
            }
            if let [b' ' | b'\t', ..] = line {
                headers.last_mut()?.1.extend_from_slice(line);
                continue;
            }
            let (name, value) = line.split_at_checked(line.iter().position(|b| *b == b':')?)?;
            if name.is_empty() || !name.iter().all(|b| is_token(*b)) {
                return None;
            }
            headers.push((name.to_ascii_lowercase(), value.get(1..)?.to_vec()));
        }
        headers.sort_by(|(a, _), (b, _)| a.cmp(b));
        let part = Self { headers, content };
        part.is_clear().then_some(part)
    }

    /// Whether all parsers find the same type and the same disposition.
    fn is_clear(&self) -> bool {
        let twice = |pair: &[(Vec<u8>, Vec<u8>)]| match pair {
            [(a, _), (b, _)] => a == b && is_parametered(a),
            _ => false,
        };
        !self.headers.windows(2).any(twice)
    }

    /// The name of the form field that this part is.
    fn field(&self) -> Option<Vec<u8>> {
        let (_, value) = self.headers.iter().find(|(name, _)| name == b"content-disposition")?;
        let disposition = ParameterizedValue::parse(value)?;
        let is_field = disposition.value.eq_ignore_ascii_case(b"form-data");
        let is_field = is_field && !disposition.is_continued("name");
        disposition.get("name").filter(|_| is_field).map(<[u8]>::to_vec)
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_length(out, self.headers.len());
        for (name, value) in &self.headers {
            write_text(name, out);
            match ParameterizedValue::parse(value).filter(|_| is_parametered(name)) {
                Some(read) => {
                    out.push(b'p');
                    write_text(&read.value.to_ascii_lowercase(), out);
                    write_parameters(read.parameters.iter(), out);
                }
                None => {
                    out.push(b'v');
                    write_text(trim(value), out);
                }
            }
        }
        write_text(self.content, out);
    }
}

/// Whether a header is taken apart into a value and parameters, if it has that form.
fn is_parametered(name: &[u8]) -> bool {
    name == b"content-disposition" || name == b"content-type"
}

/// The text between CRLFs.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let end = memmem::find(text, b"\r\n");
        rest = end.and_then(|end| text.get(end + 2..));
        text.get(..end.unwrap_or(text.len()))
    })
}

fn write_text(text: &[u8], out: &mut Vec<u8>) {
    write_length(out, text.len());
    out.extend_from_slice(text);
}

fn write_parameters<'p>(
    parameters: impl Iterator<Item = &'p (Vec<u8>, &'p [u8])> + Clone,
    out: &mut Vec<u8>,
) {
    write_length(out, parameters.clone().count());
    for (name, text) in parameters {
        write_text(name, out);
        write_text(text, out);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FORM: &str = "multipart/form-data; boundary=B";

    fn of(kind: &str, body: &[u8]) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        let selection = Selection { only: Vec::new(), ignore: vec!["ts".to_owned()] };
        write(kind.as_bytes(), body, &selection, &mut out).map(|_| out)
    }

    fn form(body: &str) -> Option<Vec<u8>> {
        of(FORM, body.as_bytes())
    }

    /// A body of such parts, each with its headers and its content.
    fn body(parts: &[&str]) -> String {
        parts.iter().map(|part| format!("--B\r\n{part}\r\n")).collect::<String>() + "--B--\r\n"
    }

    fn field(name: &str, content: &str) -> String {
        format!("Content-Disposition: form-data; name=\"{name}\"\r\n\r\n{content}")
    }

    fn file(headers: &str) -> Option<Vec<u8>> {
        form(&body(&[&format!("{headers}\r\n\r\nhi")]))
    }

    #[test]
    fn c09_the_boundary_does_not_matter_and_each_byte_of_a_part_does() {
        let plain = body(&[&field("a", "1"), &field("b", "2")]);
        let same = form(&plain);
        assert!(same.is_some());
        for kind in
            ["multipart/form-data;boundary=\"x y\"", "Multipart/Form-Data; Boundary=\"x y\""]
        {
            assert_eq!(same, of(kind, plain.replace("--B", "--x y").as_bytes()), "{kind}");
        }
        let ended = plain.strip_suffix("\r\n").unwrap();
        assert_eq!(same, form(&format!("preamble\r\n\r\n{ended}  \r\nepilogue")));
        assert_eq!(same, form(&plain.replacen("--B\r\n", "--B \t\r\n", 1)));
        assert_eq!(same, form(&body(&[&field("b", "2"), &field("a", "1")])), "order of names");
        assert_eq!(same, form(&body(&[&field("a", "1"), &field("ts", "9"), &field("b", "2")])));
        for other in [
            body(&[&field("a", "1"), &field("b", "3")]),
            body(&[&field("a", "1"), &field("c", "2")]),
            body(&[&field("a", "1\r\n"), &field("b", "2")]),
            body(&[&field("a", "1"), &field("b", "2"), &field("b", "2")]),
            body(&[&field("a", "1")]),
            body(&[]),
        ] {
            assert_ne!(same, form(&other), "{other}");
        }
        assert!(form(&body(&[])).is_some());
        let [ab, ba] = [["1", "2"], ["2", "1"]]
            .map(|[one, two]| form(&body(&[&field("a", one), &field("a", two)])));
        assert_ne!(ab, ba, "order of one name");
    }

    #[test]
    fn what_some_readers_take_for_boundary_or_name_is_not_passed_over() {
        // A reader of RFC 2231 finds other parts: where others see a preamble.
        let hidden = |amount: &str| {
            let field = field("amount", amount);
            format!("--C\r\n{field}\r\n--C--\r\n{}", body(&[&self::field("a", "1")]))
        };
        for kind in ["boundary=B; boundary*=us-ascii''C", "boundary=B; boundary*0=C"] {
            let kind = format!("multipart/form-data; {kind}");
            assert_eq!(of(&kind, hidden("1").as_bytes()), None, "{kind}");
        }
        assert!(
            of("multipart/form-data; boundary=B; boundaries=C", hidden("1").as_bytes()).is_some()
        );
        // Two fields of one name, to such a reader: their order counts.
        let twice = ["a", "b"].map(|name| {
            format!("Content-Disposition: form-data; name={name}; name*=utf-8''x\r\n\r\n{name}")
        });
        assert_eq!(form(&body(&[&twice[0], &twice[1]])), None);
        let order = |[a, b]: [&str; 2]| {
            let ([one, two], other) = ([field(a, "1"), field(b, "2")], field("o", "3"));
            assert_eq!(form(&body(&[&one, &other, &two])), form(&body(&[&other, &one, &two])));
            form(&body(&[&one, &two])) != form(&body(&[&two, &one]))
        };
        for names in [[r"a\b", "ab"], ["i[][s]", "i[][q]"], ["a", "a[b]"], ["a.b", "a_b"]] {
            assert!(order(names), "{names:?}");
        }
        assert!(!order(["a[b]", "a[c]"]));
    }

    #[test]
    fn only_the_named_fields_count_where_there_are_any() {
        let selection =
            Selection { only: vec!["id".to_owned(), "n".to_owned()], ignore: vec!["n".to_owned()] };
        let form = |fields: &[(&str, &str)]| {
            let parts = fields.iter().map(|(name, content)| field(name, content));
            let parts = parts.collect::<Vec<_>>();
            let body = body(&parts.iter().map(String::as_str).collect::<Vec<_>>());
            let mut out = Vec::new();
            write(FORM.as_bytes(), body.as_bytes(), &selection, &mut out).map(|kept| (kept, out))
        };
        assert_eq!(
            form(&[("id", "1"), ("at", "1")]),
            form(&[("at", "2"), ("id", "1"), ("n", "1")])
        );
        assert_ne!(form(&[("id", "1")]), form(&[("id", "2")]));
        assert_ne!(form(&[("at", "1")]), form(&[("at", "2")]));
        assert_ne!(form(&[("n", "1")]), form(&[]));
    }

    #[test]
    fn the_spelling_of_headers_does_not_matter_and_what_they_say_does() {
        let plain = file(
            "Content-Disposition: form-data; name=\"f\"; filename=\"x.txt\"\r\nContent-Type: text/plain",
        );
        assert!(plain.is_some());
        for same in [
            "content-disposition:form-data;name=f;filename=x.txt\r\nCONTENT-TYPE:  Text/Plain ",
            "Content-Type: text/plain\r\nContent-Disposition: Form-Data;\r\n filename=\"x.txt\";\r\n\tname=\"f\"",
        ] {
            assert_eq!(plain, file(same), "{same}");
        }
        for other in [
            "Content-Disposition: form-data; name=\"f\"; filename=\"y.txt\"\r\nContent-Type: text/plain",
            "Content-Disposition: form-data; name=\"f\"; filename*=\"x.txt\"\r\nContent-Type: text/plain",
            "Content-Disposition: form-data; name=\"F\"; filename=\"x.txt\"\r\nContent-Type: text/plain",
            "Content-Disposition: form-data; name=\"f\"; filename=\"x.txt\"\r\nContent-Type: text/html",
            "Content-Disposition: form-data; name=\"f\"; filename=\"x.txt\"\r\nContent-Type: text/plain; charset=utf-8",
            "Content-Disposition: form-data; name=\"f\"; filename=\"x.txt\"\r\nContent-Type: text/plain\r\nContent-Transfer-Encoding: base64",
            "Content-Disposition: form-data; name=\"f\"; filename=\"x.txt\"",
            "Content-Disposition: form-data; name=\"f\"\r\nContent-Type: text/plain",
        ] {
            assert!(file(other).is_some_and(|other| plain != Some(other)), "{other}");
        }
        let [odd, even] = ["a b", "a  b"].map(|name| {
            file(&format!(
                "Content-Disposition: form-data; name=f\r\nContent-Type: a/b; name={name}"
            ))
        });
        assert!(odd.is_some() && odd != even, "a type that is not of the form");
        let [windows, mac] = [r"a\b", "ab"].map(|name| {
            file(&format!("Content-Disposition: form-data; name=f; filename=\"{name}\""))
        });
        assert_ne!(windows, mac);
    }

    #[test]
    fn what_readers_take_apart_differently_is_not_taken_apart() {
        let plain = body(&[&field("a", "1")]);
        for kind in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=\"\"",
            "multipart/form-data; boundary=B; boundary=B",
            "multipart/form-data; boundary=\"B \"",
            "multipart/form-data; boundary=C",
        ] {
            assert_eq!(of(kind, plain.as_bytes()), None, "{kind}");
        }
        for wrong in [
            plain.replace("\r\n", "\n"),
            plain.replace("--B--\r\n", ""),
            plain.replace("--B--", "--B-"),
            plain.replace("--B--", "--B"),
            format!("{plain}--B--\r\n"),
            format!("{plain}\r\n--B\r\n"),
            format!("junk{plain}"),
            body(&[&field("a", "1\r\n--BB")]),
            body(&[&field("a", "1\n--B\r\n2")]),
            body(&[&field("a", "1 --B 2")]),
            body(&["\r\n1"]),
            body(&["Content-Disposition: form-data; name=a"]),
            body(&["Content-Disposition: form-data\r\n\r\n1"]),
            body(&["Content-Disposition: attachment; name=a\r\n\r\n1"]),
            body(&["Content-Type: text/plain\r\n\r\n1"]),
            body(&["Content-Disposition: form-data; name=a; name=b\r\n\r\n1"]),
            body(&[" Content-Disposition: form-data; name=a\r\n\r\n1"]),
            body(&["Content-Disposition : form-data; name=a\r\n\r\n1"]),
            body(&["Content-Disposition: form-data; name=a\nX: b\r\n\r\n1"]),
            body(&[
                "Content-Disposition: form-data; name=a\r\nContent-Disposition: form-data; name=b\r\n\r\n1",
            ]),
            body(&["nonsense\r\nContent-Disposition: form-data; name=a\r\n\r\n1"]),
            body(&[""]),
            "--B\r\n--B--\r\n".to_owned(),
            String::new(),
        ] {
            assert_eq!(form(&wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn of_other_multiparts_order_and_parameters_count() {
        let parts =
            ["Content-ID: <a>\r\n\r\n1", "Content-Type: text/xml\r\nContent-ID: <b>\r\n\r\n2"];
        let related = |kind: &str, boundary: &str, parts: &[&str]| {
            let kind = format!("multipart/{kind}; boundary={boundary}");
            let form = of(&kind, body(parts).replace("--B", &format!("--{boundary}")).as_bytes());
            assert!(form.is_some(), "{kind}");
            form
        };
        let plain = related("related; start=\"<a>\"", "B", &parts);
        assert_eq!(plain, related("related; start=\"<a>\"", "C", &parts));
        assert_ne!(plain, related("related; start=\"<b>\"", "B", &parts));
        assert_ne!(plain, related("related; start=\"<a>\"", "B", &[parts[1], parts[0]]));
        assert_ne!(plain, related("related; start=\"<a>\"", "B", &[parts[0], "\r\n2"]));
    }

    /// Name, file name and content.
    type Field = (String, Option<String>, Vec<u8>);

    fn fields() -> impl Strategy<Value = Vec<Field>> {
        let field = (
            "[a-c]{1,2}",
            prop::option::of("[a-z]{0,3}"),
            prop::collection::vec(any::<u8>(), 0..20),
        );
        prop::collection::vec(field, 0..5)
    }

    /// One of the spellings of a form.
    fn spell(fields: &[Field], seed: u64) -> (String, Vec<u8>) {
        let mut random = fastrand::Rng::with_seed(seed);
        let boundary = format!("----boundary{}", random.u64(..));
        let mut left = fields.to_vec();
        let mut body = Vec::new();
        while !left.is_empty() {
            // Any field but one that stands behind another of its name.
            let at = random.usize(..left.len());
            let name = left[at].0.clone();
            let (name, file, content) = left.remove(left.iter().position(|f| f.0 == name).unwrap());
            let mut parameters = vec![format!("name=\"{name}\"")];
            if random.bool() {
                parameters[0] = format!("Name={name}");
            }
            parameters.extend(file.map(|file| format!("filename=\"{file}\"")));
            random.shuffle(&mut parameters);
            let separator = random.choice(["; ", ";", ";\r\n ", " ;\t"]).unwrap();
            let header = random.choice(["Content-Disposition: ", "content-disposition:"]).unwrap();
            let line = format!(
                "--{boundary}\r\n{header}form-data{separator}{}\r\n\r\n",
                parameters.join(separator)
            );
            body.extend(line.bytes().chain(content).chain(*b"\r\n"));
        }
        body.extend(format!("--{boundary}--").bytes());
        body.extend(random.choice(["", "\r\n", "\r\nepilogue"]).unwrap().bytes());
        (format!("multipart/form-data; boundary={boundary}"), body)
    }

    proptest! {
        #[test]
        fn spelling_does_not_matter_and_fields_do(
            a in fields(), b in fields(), seeds in any::<[u64; 2]>(), place in any::<prop::sample::Index>(),
        ) {
            let spelled = |fields: &[Field], seed| {
                let (kind, body) = spell(fields, seed);
                of(&kind, &body)
            };
            let plain = spelled(&a, seeds[0]);
            prop_assert!(plain.is_some());
            prop_assert_eq!(&plain, &spelled(&a, seeds[1]));
            let sorted = |fields: &[Field]| {
                let mut fields = fields.to_vec();
                fields.sort_by(|a, b| a.0.cmp(&b.0));
                fields
            };
            prop_assert_eq!(sorted(&a) == sorted(&b), plain == spelled(&b, seeds[1]));
            if !a.is_empty() {
                let mut changed = a.clone();
                place.get_mut(&mut changed).2.push(b'x');
                prop_assert_ne!(&plain, &spelled(&changed, seeds[1]));
            }
        }

        #[test]
        fn no_bytes_panic(kind in "multipart/(form-data|mixed); boundary=[-AB\" ]{0,3}", body in "(--|A|B|\r\n|Content-Disposition: form-data|; name=|[a\":;\n ]){0,30}") {
            let _form = of(&kind, body.as_bytes());
        }
    }
}
