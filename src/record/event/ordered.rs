//! Comparisons that are never a guess: numbers are compared with numbers, texts with texts, and anything else is an error.
//!
//! The engine orders values of all kinds, so that `"0" > 0` and `[] > 0` would be true. Here `a > b` is compiled as the test
//! `(a) is gt(b)`, and the tests that compare refuse what has no order. What must stay true: an expression in which it is not
//! plain what is compared with what is not compiled at all.

use std::cmp::Ordering;

use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

const CHAIN: &str = "compares more than two values at once; join comparisons with `and`";

/// Makes the tests that compare strict.
pub(super) fn make_strict(environment: &mut Environment<'static>) {
    for name in ["lt", "lessthan", "<"] {
        environment.add_test(name, |a: &Value, b: &Value| order(a, b).map(Ordering::is_lt));
    }
    for name in ["le", "<="] {
        environment.add_test(name, |a: &Value, b: &Value| order(a, b).map(Ordering::is_le));
    }
    for name in ["gt", "greaterthan", ">"] {
        environment.add_test(name, |a: &Value, b: &Value| order(a, b).map(Ordering::is_gt));
    }
    for name in ["ge", ">="] {
        environment.add_test(name, |a: &Value, b: &Value| order(a, b).map(Ordering::is_ge));
    }
}

fn order(a: &Value, b: &Value) -> Result<Ordering, Error> {
    match (a.kind(), b.kind()) {
        (ValueKind::Number, ValueKind::Number) | (ValueKind::String, ValueKind::String) => {
            Ok(a.cmp(b))
        }
        _ => Err(Error::new(ErrorKind::InvalidOperation, "values of these kinds have no order")),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Piece {
    Open,
    Close,
    /// `<` and its like, by the test's name.
    Order(&'static str),
    /// Compares as well, and binds as strongly.
    Equal,
    Not,
    /// Binds less than a comparison.
    Edge,
    /// Binds more, or is a value.
    Inner,
}

struct Token {
    start: usize,
    end: usize,
    piece: Piece,
}

/// The same expression with each comparison by order as a test. It must be an expression that compiles.
///
/// # Errors
/// A chain of comparisons.
pub(super) fn as_tests(source: &str) -> Result<String, &'static str> {
    let tokens = tokens(source);
    let mut edits = Vec::new();
    for (place, token) in tokens.iter().enumerate() {
        let Piece::Order(test) = token.piece else { continue };
        let left = operand(tokens.iter().take(place).rev(), Piece::Close)?;
        let right = operand(tokens.iter().skip(place + 1), Piece::Open)?;
        edits.push((left.start, left.start, "((".to_owned()));
        edits.push((token.start, token.end, format!(") is {test}(")));
        edits.push((right.end, right.end, "))".to_owned()));
    }
    edits.sort_by_key(|(start, ..)| *start);
    let mut written = String::with_capacity(source.len() + edits.len() * 8);
    let mut done = 0;
    for (start, end, text) in edits {
        written.push_str(source.get(done..start).unwrap_or_default());
        written.push_str(&text);
        done = end;
    }
    written.push_str(source.get(done..).unwrap_or_default());
    Ok(written)
}

/// The last token of the operand that begins here, read away from its operator.
fn operand<'a>(
    tokens: impl Iterator<Item = &'a Token>,
    entering: Piece,
) -> Result<&'a Token, &'static str> {
    let mut depth = 0_usize;
    let mut last = None;
    for token in tokens {
        match token.piece {
            piece if piece == entering => depth += 1,
            Piece::Open | Piece::Close if depth == 0 => break,
            Piece::Open | Piece::Close => depth -= 1,
            _ if depth > 0 => {}
            Piece::Order(_) | Piece::Equal => return Err(CHAIN),
            // After an operand it is `not in`.
            Piece::Not if entering == Piece::Open => return Err(CHAIN),
            Piece::Not | Piece::Edge => break,
            Piece::Inner => {}
        }
        last = Some(token);
    }
    last.ok_or("compares nothing")
}

fn tokens(source: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let (mut start, mut after_dot) = (0, false);
    while let Some(rest) = source.get(start..)
        && let Some(first) = rest.chars().next()
    {
        let (length, piece) = token(first, rest, after_dot);
        let end = start + length;
        if !first.is_whitespace() {
            tokens.push(Token { start, end, piece });
            after_dot = first == '.';
        }
        start = end;
    }
    tokens
}

/// Length and meaning of the first token.
fn token(first: char, rest: &str, after_dot: bool) -> (usize, Piece) {
    if matches!(first, '"' | '\'') {
        return (quoted(first, rest), Piece::Inner);
    }
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    if in_word(first) {
        let length = rest.find(|c| !in_word(c)).unwrap_or(rest.len());
        let piece = match rest.get(..length).unwrap_or_default() {
            _ if after_dot => Piece::Inner,
            "and" | "or" | "if" | "else" => Piece::Edge,
            "not" => Piece::Not,
            "in" => Piece::Equal,
            _ => Piece::Inner,
        };
        return (length, piece);
    }
    for (mark, piece) in [
        ("<=", Piece::Order("le")),
        (">=", Piece::Order("ge")),
        ("==", Piece::Equal),
        ("!=", Piece::Equal),
        ("<", Piece::Order("lt")),
        (">", Piece::Order("gt")),
    ] {
        if rest.starts_with(mark) {
            return (mark.len(), piece);
        }
    }
    let piece = match first {
        '(' | '[' | '{' => Piece::Open,
        ')' | ']' | '}' => Piece::Close,
        ',' | ':' | '=' => Piece::Edge,
        _ => Piece::Inner,
    };
    (first.len_utf8(), piece)
}

/// Length of a text with its quotes.
fn quoted(quote: char, rest: &str) -> usize {
    let mut escaped = false;
    for (place, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return place + c.len_utf8(),
            _ => {}
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_comparison_becomes_a_test_of_what_it_compares() {
        for (source, written) in [
            ("a.b > 0", "((a.b) is gt(0))"),
            ("a<=-1", "((a) is le(-1))"),
            ("not a | int > 0 and b", "not ((a | int) is gt(0)) and b"),
            ("a.in > b.and or c == 1", "((a.in) is gt(b.and)) or c == 1"),
            ("(a > 1) == (b < 2)", "(((a) is gt(1))) == (((b) is lt(2)))"),
            ("f(a > 1, x=b >= 'é>') > 2", "((f(((a) is gt(1)), x=((b) is ge('é>')))) is gt(2))"),
            (
                "a['x < \\' y'] < \"<\" if b > c else d",
                "((a['x < \\' y']) is lt(\"<\")) if ((b) is gt(c)) else d",
            ),
            ("a == '<'", "a == '<'"),
        ] {
            let spaceless = |text: &str| text.replace(' ', "");
            assert_eq!(spaceless(&as_tests(source).unwrap()), spaceless(written), "{source}");
        }
    }

    #[test]
    fn a_chain_is_refused() {
        for source in ["0 < a < 5", "a > 0 == true", "a in b > 0", "a > b not in c", "a != b <= c"]
        {
            assert_eq!(as_tests(source), Err(CHAIN), "{source}");
        }
    }
}
