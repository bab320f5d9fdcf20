//! JSON text in one canonical spelling, written in one pass.
//!
//! The canonical text has no blanks, strings with the shortest escapes, numbers in one spelling of their exact value, and
//! members sorted by the bytes of their names in this spelling. It is JSON of the same meaning, so two different documents
//! never have the same canonical text. A text that parsers are known to read differently is not read: see [`super`].
//!
//! Most of a text is already canonical. So the scanner copies the text between two deviations (a blank, an escape, an odd
//! number) as one run. A position counts the bytes of the output: the written bytes and the open run. The first pass notes
//! objects that are not sorted, and a second pass copies their pieces in order, each byte once. Both passes are linear
//! except for sorting.

use std::ops::Range;

use super::DEPTH_MAX;

/// The most digits on one side of the point of a number that is written without exponent. This bounds the length of a number.
const PLAIN_MAX: usize = 20;

/// The largest body that is read. The output is less than five times as long, so every position fits into 32 bits.
const BODY_MAX: usize = 512 << 20;

/// Where something begins and ends.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    start: u32,
    end: u32,
}

impl Span {
    /// Of no more than [`BODY_MAX`] allows.
    #[expect(clippy::cast_possible_truncation, reason = "bounded by the body's limit")]
    fn new(start: usize, end: usize) -> Self {
        Self { start: start as u32, end: end as u32 }
    }

    fn of<T>(self, list: &[T]) -> &[T] {
        list.get(self.start as usize..self.end as usize).unwrap_or_default()
    }
}

/// A member of an object: name, colon and value.
#[derive(Clone, Copy, Debug)]
struct Member {
    /// The first bytes of its name as a number that sorts as they do: they decide nearly every comparison.
    begins: u64,
    /// How many bytes its name has, without quotes.
    name: u32,
    span: Span,
    /// The objects that lie in it.
    inner: Span,
}

/// An object, in the order in which they open. One that is sorted has no members here.
#[derive(Clone, Copy, Debug, Default)]
struct Object {
    /// What lies between its braces.
    span: Span,
    members: Span,
    /// The next object that does not lie in it.
    next: u32,
}

/// The canonical text of a body. `None`: it cannot be read, and is compared byte by byte.
pub(crate) fn canonical(body: &[u8]) -> Option<Vec<u8>> {
    if body.len() > BODY_MAX || std::str::from_utf8(body).is_err() {
        return None;
    }
    let mut scanner = Scanner {
        body,
        at: 0,
        run: 0,
        out: Vec::with_capacity(body.len() + 64),
        open: Vec::new(),
        members: Vec::new(),
        objects: Vec::new(),
    };
    scanner.blank();
    scanner.value(0)?;
    scanner.blank();
    if scanner.at != body.len() {
        return None;
    }
    scanner.flush();
    Some(scanner.arranged())
}

struct Scanner<'a> {
    body: &'a [u8],
    at: usize,
    /// The text from here to `at` is canonical and not written yet.
    run: usize,
    out: Vec<u8>,
    /// Members of the objects that are not closed yet, innermost last.
    open: Vec<Member>,
    /// Members of closed objects that were not sorted.
    members: Vec<Member>,
    objects: Vec<Object>,
}

impl Scanner<'_> {
    fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        let fits = self.peek() == Some(byte);
        self.at += usize::from(fits);
        fits
    }

    /// The position of the scanner in the output.
    fn position(&self) -> usize {
        self.out.len() + (self.at - self.run)
    }

    /// Writes the run up to `end`, and begins a new one after it.
    fn flush_to(&mut self, end: usize) {
        copy(self.body, self.run, end, &mut self.out);
        self.run = end;
    }

    fn flush(&mut self) {
        self.flush_to(self.at);
    }

    /// Leaves out the white space that begins here.
    fn blank(&mut self) {
        if self.peek().is_some_and(|byte| byte <= b' ') {
            self.flush();
            let rest = self.body.get(self.at..).unwrap_or_default();
            let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
            self.at += rest.iter().take_while(|byte| blank(byte)).count();
            self.run = self.at;
        }
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        match self.peek()? {
            b'"' => self.string(),
            b'{' if depth < DEPTH_MAX => self.object(depth + 1),
            b'[' if depth < DEPTH_MAX => self.array(depth + 1),
            b'-' | b'0'..=b'9' => self.number(),
            b'n' => self.word(b"null"),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            _ => None,
        }
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        let rest = self.body.get(self.at..)?;
        self.at += word.len();
        rest.starts_with(word).then_some(())
    }

    /// Whether a list goes on after a value (`true`), or ends here; `None`: neither.
    fn goes_on(&mut self, end: u8) -> Option<bool> {
        let mut next = self.peek()?;
        if next <= b' ' {
            self.blank();
            next = self.peek()?;
        }
        self.at += 1;
        if next == b',' {
            return Some(true);
        }
        (next == end).then_some(false)
    }

    fn array(&mut self, depth: usize) -> Option<()> {
        self.at += 1;
        self.blank();
        if self.take(b']') {
            return Some(());
        }
        loop {
            self.value(depth)?;
            if !self.goes_on(b']')? {
                return Some(());
            }
            self.blank();
        }
    }

    fn object(&mut self, depth: usize) -> Option<()> {
        self.at += 1;
        self.blank();
        if self.take(b'}') {
            return Some(());
        }
        let (opened, number, start) = (self.open.len(), self.objects.len(), self.position());
        self.objects.push(Object::default());
        loop {
            let member = self.member(depth)?;
            self.open.push(member);
            if !self.goes_on(b'}')? {
                let span = Span::new(start, self.position() - 1);
                return self.close(opened, number, span);
            }
            self.blank();
        }
    }

    fn member(&mut self, depth: usize) -> Option<Member> {
        if self.peek() != Some(b'"') {
            return None;
        }
        let (from, start) = (self.at, self.position());
        self.string()?;
        let name_end = self.position() - 1;
        let begins = if self.run <= from {
            beginning(self.body, from + 1, self.at - 1)
        } else {
            // It had an escape with another spelling.
            self.flush();
            beginning(&self.out, start + 1, name_end)
        };
        if !self.take(b':') {
            self.blank();
            if !self.take(b':') {
                return None;
            }
        }
        self.blank();
        let first = self.objects.len();
        self.value(depth)?;
        let span = Span::new(start, self.position());
        let inner = Span::new(first, self.objects.len());
        let Span { end: name, .. } = Span::new(0, name_end - start - 1);
        Some(Member { begins, name, span, inner })
    }

    /// Sorts the members of a complete object; `None` if two have the same name.
    fn close(&mut self, opened: usize, number: usize, span: Span) -> Option<()> {
        let members = self.open.get(opened..)?;
        let plain = members.is_sorted_by(|a, b| a.begins < b.begins);
        let sorted = plain || self.sort(opened)?;
        let next = self.objects.len();
        if sorted {
            self.open.truncate(opened);
            if next == number + 1 {
                // Everything in it is in order, so it need not be noted.
                self.objects.pop();
            }
            return Some(());
        }
        let first = self.members.len();
        self.members.extend_from_slice(self.open.get(opened..)?);
        self.open.truncate(opened);
        let members = Span::new(first, self.members.len());
        let Span { end: next, .. } = Span::new(0, next);
        *self.objects.get_mut(number)? = Object { span, members, next };
        Some(())
    }

    /// Whether the members were already in order.
    fn sort(&mut self, opened: usize) -> Option<bool> {
        let members = self.open.get_mut(opened..)?;
        work(members.len());
        members.sort_unstable_by(|a, b| {
            work(1);
            a.begins.cmp(&b.begins).then(a.span.start.cmp(&b.span.start))
        });
        if members.is_sorted_by(|a, b| a.begins < b.begins) {
            return Some(false);
        }
        self.sort_alike(opened)
    }

    /// As [`Self::sort`], where names begin alike.
    fn sort_alike(&mut self, opened: usize) -> Option<bool> {
        self.flush();
        let out = &self.out;
        let name = |member: &Member| {
            work(member.name as usize);
            let start = member.span.start as usize + 1;
            out.get(start..start + member.name as usize).unwrap_or_default()
        };
        let members = self.open.get_mut(opened..)?;
        members.sort_unstable_by(|a, b| {
            work(1);
            a.begins.cmp(&b.begins).then_with(|| name(a).cmp(name(b)))
        });
        let same = |a: &Member, b: &Member| a.begins == b.begins && name(a) == name(b);
        let alike = |pair: &[Member]| matches!(pair, [a, b] if same(a, b));
        if members.windows(2).any(alike) {
            return None;
        }
        Some(members.is_sorted_by_key(|member| member.span.start))
    }

    fn string(&mut self) -> Option<()> {
        self.at += 1;
        loop {
            let rest = self.body.get(self.at..)?;
            let len = plain(rest)?;
            self.at += len;
            match rest.get(len)? {
                b'"' => {
                    self.at += 1;
                    return Some(());
                }
                b'\\' => self.escape(*rest.get(len + 1)?)?,
                _ => return None,
            }
        }
    }

    fn escape(&mut self, letter: u8) -> Option<()> {
        let backslash = self.at;
        self.at += 2;
        match letter {
            // The shortest spelling already.
            b'"' | b'\\' | b'b' | b'f' | b'n' | b'r' | b't' => {}
            b'/' => {
                self.flush_to(backslash);
                self.run = backslash + 1;
            }
            b'u' => {
                let letter = self.unicode()?;
                self.flush_to(backslash);
                write_letter(letter, &mut self.out);
                self.run = self.at;
            }
            _ => return None,
        }
        Some(())
    }

    fn unicode(&mut self) -> Option<char> {
        let mut code = self.hex()?;
        if (0xd800..0xdc00).contains(&code) {
            if !(self.take(b'\\') && self.take(b'u')) {
                return None;
            }
            let low = self.hex()?.checked_sub(0xdc00).filter(|low| *low < 0x400)?;
            code = 0x1_0000 + ((code - 0xd800) << 10) + low;
        }
        char::from_u32(code)
    }

    fn hex(&mut self) -> Option<u32> {
        let digits = self.body.get(self.at..self.at + 4)?;
        self.at += 4;
        digits.iter().try_fold(0, |sum, digit| Some(sum * 16 + char::from(*digit).to_digit(16)?))
    }

    fn digits(&mut self) -> Range<usize> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        start..self.at
    }

    fn number(&mut self) -> Option<()> {
        let start = self.at;
        let negative = self.take(b'-');
        let zero = self.peek() == Some(b'0');
        let whole = self.digits();
        let len = whole.len();
        if len == 0 || (zero && len > 1) {
            return None;
        }
        let mut canonical = len <= PLAIN_MAX && !(negative && zero);
        let mut fraction = self.at..self.at;
        if self.take(b'.') {
            fraction = self.digits();
            let len = fraction.len();
            let last = fraction.end.checked_sub(1).and_then(|at| self.body.get(at));
            if len == 0 {
                return None;
            }
            canonical = len <= PLAIN_MAX && last != Some(&b'0');
        }
        let mut power = None;
        if self.take(b'e') || self.take(b'E') {
            let below = !self.take(b'+') && self.take(b'-');
            let digits = self.digits();
            if digits.is_empty() {
                return None;
            }
            power = Some((below, digits));
        }
        if canonical && power.is_none() {
            return Some(());
        }
        self.flush_to(start);
        self.exact(negative, whole, fraction, power)?;
        self.run = self.at;
        Some(())
    }

    /// Writes the canonical spelling of a number; `None` if its exponent does not fit into 64 bits.
    fn exact(
        &mut self,
        negative: bool,
        whole: Range<usize>,
        fraction: Range<usize>,
        power: Option<(bool, Range<usize>)>,
    ) -> Option<()> {
        let places = i64::try_from(fraction.len()).ok()?;
        let part = |span: Range<usize>| self.body.get(span);
        let digits = [part(whole)?, part(fraction)?].concat();
        let Some(leading) = digits.iter().position(|digit| *digit != b'0') else {
            self.out.push(b'0');
            return Some(());
        };
        let trailing = digits.iter().rev().take_while(|digit| **digit == b'0').count();
        let mut exponent = match power {
            Some((below, span)) => size(below, part(span)?)?,
            None => 0,
        };
        exponent = exponent.checked_sub(places)?;
        exponent = exponent.checked_add(i64::try_from(trailing).ok()?)?;
        let digits = digits.get(leading..digits.len() - trailing)?;
        if negative {
            self.out.push(b'-');
        }
        write_decimal(digits, exponent, &mut self.out);
        Some(())
    }

    /// The text with the members of each object in their order.
    fn arranged(self) -> Vec<u8> {
        if self.members.is_empty() {
            return self.out;
        }
        let mut text = Vec::with_capacity(self.out.len() + 64);
        let (whole, all) = (Span::new(0, self.out.len()), Span::new(0, self.objects.len()));
        self.arrange(whole, all, &mut text);
        text
    }

    /// Copies a piece with sorted objects. The recursion is no deeper than the document.
    fn arrange(&self, piece: Span, inner: Span, text: &mut Vec<u8>) {
        let copy = |text: &mut Vec<u8>, start: u32, end: u32| {
            copy(&self.out, start as usize, end as usize, text);
        };
        let (mut from, mut number) = (piece.start, inner.start);
        while number < inner.end {
            let Some(object) = self.objects.get(number as usize) else { break };
            let members = object.members.of(&self.members);
            number += 1;
            if members.is_empty() {
                continue;
            }
            copy(text, from, object.span.start);
            for (index, member) in members.iter().enumerate() {
                if index > 0 {
                    text.push(b',');
                }
                if member.inner.start == member.inner.end {
                    copy(text, member.span.start, member.span.end);
                } else {
                    self.arrange(member.span, member.inner, text);
                }
            }
            (from, number) = (object.span.end, object.next);
        }
        copy(text, from, piece.end);
    }
}

/// Copies a piece. Most pieces are short, and a copy of a fixed size is the fastest; the extra bytes are removed again.
fn copy(from: &[u8], start: usize, end: usize, to: &mut Vec<u8>) {
    const SHORT: usize = 32;
    let len = end - start;
    work(len);
    match from.get(start..).and_then(<[u8]>::first_chunk::<SHORT>) {
        Some(piece) if len <= SHORT => {
            let whole = to.len() + len;
            to.extend_from_slice(piece);
            to.truncate(whole);
        }
        Some(_) | None => to.extend_from_slice(from.get(start..end).unwrap_or_default()),
    }
}

/// How many bytes lie before the first quote, backslash or control character. `None`: there is none.
fn plain(text: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::MAX / 255;
    const HIGH: u64 = ONES * 0x80;
    let mut at = 0;
    // Eight bytes at once. A byte below n is one whose high bit n borrows; the lowest one found is always right.
    while let Some(eight) = text.get(at..).and_then(<[u8]>::first_chunk::<8>) {
        let word = u64::from_le_bytes(*eight);
        let (quote, slash) = (word ^ (ONES * 0x22), word ^ (ONES * 0x5c));
        let control = word.wrapping_sub(ONES * 0x20) & !word;
        let found = (quote.wrapping_sub(ONES) & !quote) | (slash.wrapping_sub(ONES) & !slash);
        let found = (found | control) & HIGH;
        if found != 0 {
            return Some(at + (found.trailing_zeros() / 8) as usize);
        }
        at += 8;
    }
    let rest = text.get(at..)?;
    let stop = |byte: &u8| *byte < 0x20 || *byte == b'"' || *byte == b'\\';
    rest.iter().position(stop).map(|len| at + len)
}

/// Up to eight bytes of a name as a number. No name holds a zero byte, so a shorter name sorts first.
fn beginning(text: &[u8], start: usize, end: usize) -> u64 {
    let len = end.saturating_sub(start);
    if let Some(eight) = text.get(start..).and_then(<[u8]>::first_chunk::<8>) {
        let word = u64::from_be_bytes(*eight);
        return match len {
            0 => 0,
            1..=7 => word & (u64::MAX << (64 - 8 * len)),
            _ => word,
        };
    }
    let mut first = [0; 8];
    for (to, from) in first.iter_mut().zip(text.get(start..end).unwrap_or_default()) {
        *to = *from;
    }
    u64::from_be_bytes(first)
}

fn size(below: bool, digits: &[u8]) -> Option<i64> {
    let size = digits.iter().try_fold(0_i64, |sum, digit| {
        sum.checked_mul(10)?.checked_add(i64::from(digit.checked_sub(b'0')?))
    })?;
    Some(if below { -size } else { size })
}

/// `digits` × 10^`exponent`, in the one spelling of its value; no zeros at either end of the digits.
fn write_decimal(digits: &[u8], exponent: i64, out: &mut Vec<u8>) {
    let places = usize::try_from(exponent.unsigned_abs()).unwrap_or(usize::MAX);
    if exponent >= 0 && places.saturating_add(digits.len()) <= PLAIN_MAX {
        out.extend_from_slice(digits);
        out.resize(out.len() + places, b'0');
    } else if exponent < 0 && places <= PLAIN_MAX {
        let (whole, fraction) = digits.split_at(digits.len().saturating_sub(places));
        out.extend_from_slice(if whole.is_empty() { b"0" } else { whole });
        out.push(b'.');
        out.resize(out.len() + places - fraction.len(), b'0');
        out.extend_from_slice(fraction);
    } else {
        out.extend_from_slice(digits);
        if exponent != 0 {
            out.push(b'e');
            out.extend_from_slice(exponent.to_string().as_bytes());
        }
    }
}

/// A character of a string in its shortest spelling.
fn write_letter(letter: char, out: &mut Vec<u8>) {
    let short = match letter {
        '"' | '\\' => Some(letter),
        '\u{8}' => Some('b'),
        '\u{c}' => Some('f'),
        '\n' => Some('n'),
        '\r' => Some('r'),
        '\t' => Some('t'),
        '\0'..='\u{1f}' => {
            out.extend_from_slice(format!("\\u{:04x}", u32::from(letter)).as_bytes());
            return;
        }
        _ => None,
    };
    if short.is_some() {
        out.push(b'\\');
    }
    let letter = short.unwrap_or(letter);
    out.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
}

/// A string in its canonical spelling, without quotes.
pub(super) fn spelt(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    text.chars().for_each(|letter| write_letter(letter, &mut out));
    out
}

/// Counts what is done, so that a test can bound it.
fn work(amount: usize) {
    #[cfg(test)]
    tests::WORK.set(tests::WORK.get() + amount);
    #[cfg(not(test))]
    let _ = amount;
}

#[cfg(test)]
mod tests;
