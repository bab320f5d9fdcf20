//! Canonical forms as text. JSON and XML are text already; pairs are decoded from their lengths.

/// Name and value, decoded.
pub(super) type Pair = (Vec<u8>, Vec<u8>);

/// Decodes the output of `form::write`. `None`: the bytes are something else.
pub(super) fn pairs(mut form: &[u8]) -> Option<Vec<Pair>> {
    let count = length(&mut form)?;
    // Each takes two bytes at least.
    let mut pairs = Vec::with_capacity(count.min(form.len() / 2));
    for _ in 0..count {
        let name = piece(&mut form)?.to_vec();
        pairs.push((name, piece(&mut form)?.to_vec()));
    }
    form.is_empty().then_some(pairs)
}

fn piece<'f>(form: &mut &'f [u8]) -> Option<&'f [u8]> {
    let length = length(form)?;
    let (piece, rest) = form.split_at_checked(length)?;
    *form = rest;
    Some(piece)
}

fn length(form: &mut &[u8]) -> Option<usize> {
    let (mut length, mut shift) = (0_usize, 0_u32);
    loop {
        let (byte, rest) = form.split_first()?;
        *form = rest;
        length |= usize::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(length);
        }
        shift += 7;
    }
}

/// A canonical body as text, cut to about this many bytes; `Err`: the first bytes of a body that is no text.
pub(super) fn shown<'b>(
    form: Option<&str>,
    body: &'b [u8],
    max: usize,
) -> Result<String, &'b [u8]> {
    if form.is_some_and(|form| form.starts_with("form"))
        && let Some(pairs) = pairs(body)
    {
        let mut text = String::new();
        for (name, value) in &pairs {
            let (name, value) = (String::from_utf8_lossy(name), String::from_utf8_lossy(value));
            text.push_str(&format!("{name}={value}\n"));
            if text.len() > max {
                break;
            }
        }
        return Ok(cut(&text, max).to_owned());
    }
    let start = body.get(..max).unwrap_or(body);
    match std::str::from_utf8(start) {
        Ok(text) => Ok(text.to_owned()),
        // Cut within a letter.
        Err(error) if error.error_len().is_none() && start.len() < body.len() => {
            Ok(String::from_utf8_lossy(start).trim_end_matches('\u{fffd}').to_owned())
        }
        Err(_) => Err(start),
    }
}

/// The start of a text, of at most this many bytes.
pub(super) fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}
