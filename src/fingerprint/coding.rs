//! Decodes content codings (RFC 9110, 8.4.1): gzip, deflate, br and zstd.
//!
//! Decoded bodies are used to compare requests, and for callers that do not accept a coding. Requests are forwarded as
//! received.
//! A body that ends early, goes on after its end, fails its checksum, or decodes to more than the limit is not decoded at all;
//! the bytes are then used as they are.
//!
//! Invariants: memory is bounded by the limit and a window (deflate 32 KiB, zstd 8 MiB, br 16 MiB), whatever the body
//! declares.
//! The work is linear in the body and the limit. So the decoders run in small steps and stop at the limit, larger windows are
//! refused, and the number of members, frames and codings is bounded. A decoder that panics counts as a failure to decode.

use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};

use brotli_decompressor::{BrotliDecompressStream, BrotliResult, BrotliState, StandardAlloc};
use flate2::bufread::GzDecoder;
use flate2::{Decompress, FlushDecompress, Status};
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The largest zstd window that a body may ask for: the limit of RFC 9659 for the web.
const ZSTD_WINDOW_MAX: u64 = 8 << 20;

/// How many codings a body may have.
const CODINGS_MAX: usize = 4;

/// How many gzip members or zstd frames one body may be made of: each costs the decoder a new start.
const MEMBERS_MAX: usize = 1024;

/// How much is decoded between two checks of the limit.
const STEP: usize = 16 << 10;

/// A coding that can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// `gzip`, `x-gzip`.
    Gzip,
    /// `deflate`: with the zlib wrapper, as it should be, or without, as some send it.
    Deflate,
    /// `br`.
    Brotli,
    /// `zstd`.
    Zstd,
}

/// Why a body stays as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undecoded {
    /// It has a coding that is not known here, or too many of them.
    Unknown,
    /// It would be larger than the limit, or needs more memory than is allowed.
    TooLarge,
    /// It is not what its coding says: cut, damaged, or followed by something else.
    Malformed,
}

/// The codings of a body in the order in which they were applied; empty if it has none.
///
/// # Errors
/// [`Undecoded::Unknown`]
pub fn codings(headers: &HeaderMap) -> Result<Vec<Coding>, Undecoded> {
    let mut codings = Vec::new();
    for line in headers.get_all(CONTENT_ENCODING) {
        for name in line.as_bytes().split(|b| *b == b',') {
            let known = match name.trim_ascii().to_ascii_lowercase().as_slice() {
                b"" | b"identity" => continue,
                b"gzip" | b"x-gzip" => Coding::Gzip,
                b"deflate" => Coding::Deflate,
                b"br" => Coding::Brotli,
                b"zstd" => Coding::Zstd,
                _ => return Err(Undecoded::Unknown),
            };
            codings.push(known);
        }
    }
    if codings.len() > CODINGS_MAX { Err(Undecoded::Unknown) } else { Ok(codings) }
}

/// Decodes the codings, the last one first. No step may give more than `limit` bytes.
///
/// # Errors
/// The body cannot be decoded as a whole.
pub fn decode(codings: &[Coding], body: &[u8], limit: usize) -> Result<Vec<u8>, Undecoded> {
    let mut decoded = None;
    for coding in codings.iter().rev() {
        let from = decoded.as_deref().unwrap_or(body);
        // What a decoder leaves behind when it panics is dropped here.
        let step = catch_unwind(AssertUnwindSafe(|| one(*coding, from, limit)));
        decoded = Some(step.unwrap_or(Err(Undecoded::Malformed))?);
    }
    match decoded {
        Some(decoded) => Ok(decoded),
        None if body.len() > limit => Err(Undecoded::TooLarge),
        None => Ok(body.to_vec()),
    }
}

fn one(coding: Coding, body: &[u8], limit: usize) -> Result<Vec<u8>, Undecoded> {
    let mut out = Vec::with_capacity(body.len().saturating_mul(4).min(limit).min(1 << 20));
    match coding {
        Coding::Gzip => gzip(body, limit, &mut out)?,
        Coding::Deflate => deflate(body, limit, &mut out)?,
        Coding::Brotli => brotli(body, limit, &mut out)?,
        Coding::Zstd => zstd(body, limit, &mut out)?,
    }
    Ok(out)
}

/// Members one after the other are one text (RFC 1952, 2.2).
fn gzip(mut body: &[u8], limit: usize, out: &mut Vec<u8>) -> Result<(), Undecoded> {
    for _ in 0..MEMBERS_MAX {
        let mut member = GzDecoder::new(body);
        drain(&mut member, limit, out)?;
        body = member.into_inner();
        if body.is_empty() {
            return Ok(());
        }
    }
    Err(Undecoded::TooLarge)
}

fn deflate(body: &[u8], limit: usize, out: &mut Vec<u8>) -> Result<(), Undecoded> {
    match inflate(true, body, limit, out) {
        // The checksum proves that there is a wrapper. Nothing proves that there is none.
        Err(Undecoded::Malformed) => {
            out.clear();
            inflate(false, body, limit, out)
        }
        decided => decided,
    }
}

fn inflate(wrapped: bool, body: &[u8], limit: usize, out: &mut Vec<u8>) -> Result<(), Undecoded> {
    let mut state = Decompress::new(wrapped);
    let mut step = [0; STEP];
    let mut rest = body;
    loop {
        let before = (state.total_in(), state.total_out());
        let status = state.decompress(rest, &mut step, FlushDecompress::None);
        let status = status.map_err(|_| Undecoded::Malformed)?;
        let read = usize::try_from(state.total_in() - before.0).unwrap_or(usize::MAX);
        let len = usize::try_from(state.total_out() - before.1).unwrap_or(usize::MAX);
        rest = rest.get(read..).unwrap_or_default();
        keep(step.get(..len).unwrap_or_default(), limit, out)?;
        match status {
            Status::StreamEnd if rest.is_empty() => return Ok(()),
            Status::Ok | Status::BufError if (read, len) != (0, 0) => {}
            Status::StreamEnd | Status::Ok | Status::BufError => return Err(Undecoded::Malformed),
        }
    }
}

fn drain(from: &mut impl Read, limit: usize, out: &mut Vec<u8>) -> Result<(), Undecoded> {
    let mut step = [0; STEP];
    loop {
        let len = from.read(&mut step).map_err(|_| Undecoded::Malformed)?;
        if len == 0 {
            return Ok(());
        }
        keep(step.get(..len).unwrap_or_default(), limit, out)?;
    }
}

fn keep(piece: &[u8], limit: usize, out: &mut Vec<u8>) -> Result<(), Undecoded> {
    if piece.len() > limit.saturating_sub(out.len()) {
        return Err(Undecoded::TooLarge);
    }
    out.extend_from_slice(piece);
    Ok(())
}

fn brotli(body: &[u8], limit: usize, out: &mut Vec<u8>) -> Result<(), Undecoded> {
    let alloc = StandardAlloc::default;
    // Strict: no windows beyond the 16 MiB of RFC 7932.
    let mut state = BrotliState::new_strict(alloc(), alloc(), alloc());
    let (mut left, mut at, mut total) = (body.len(), 0, 0);
    let mut step = [0; STEP];
    loop {
        let (mut room, mut len) = (STEP, 0);
        let result = BrotliDecompressStream(
            &mut left, &mut at, body, &mut room, &mut len, &mut step, &mut total, &mut state,
        );
        keep(step.get(..len).unwrap_or_default(), limit, out)?;
        match result {
            BrotliResult::ResultSuccess if left == 0 => return Ok(()),
            BrotliResult::NeedsMoreOutput if len > 0 => {}
            BrotliResult::NeedsMoreOutput
            | BrotliResult::ResultSuccess
            | BrotliResult::NeedsMoreInput
            | BrotliResult::ResultFailure => return Err(Undecoded::Malformed),
        }
    }
}

/// Frames one after the other are one text, and skippable frames are empty (RFC 8878, 3.1).
fn zstd(mut body: &[u8], limit: usize, out: &mut Vec<u8>) -> Result<(), Undecoded> {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(ZSTD_WINDOW_MAX);
    for _ in 0..MEMBERS_MAX {
        match decoder.reset(&mut body) {
            Ok(()) => frame(&mut decoder, &mut body, limit, out)?,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let length = usize::try_from(length).map_err(|_| Undecoded::Malformed)?;
                body = body.get(length..).ok_or(Undecoded::Malformed)?;
            }
            Err(FrameDecoderError::WindowSizeTooBig { .. }) => return Err(Undecoded::TooLarge),
            Err(_) => return Err(Undecoded::Malformed),
        }
        if body.is_empty() {
            return Ok(());
        }
    }
    Err(Undecoded::TooLarge)
}

fn frame(
    decoder: &mut FrameDecoder,
    body: &mut &[u8],
    limit: usize,
    out: &mut Vec<u8>,
) -> Result<(), Undecoded> {
    let before = out.len();
    loop {
        let step = BlockDecodingStrategy::UptoBlocks(1);
        decoder.decode_blocks(&mut *body, step).map_err(|_| Undecoded::Malformed)?;
        if decoder.can_collect() > limit.saturating_sub(out.len()) {
            return Err(Undecoded::TooLarge);
        }
        decoder.collect_to_writer(&mut *out).map_err(|_| Undecoded::Malformed)?;
        if decoder.is_finished() {
            break;
        }
    }
    let len = (out.len() - before) as u64;
    let sum = decoder.get_checksum_from_data();
    let claimed = decoder.content_size();
    if (claimed != 0 && claimed != len)
        || (sum.is_some() && sum != decoder.get_calculated_checksum())
    {
        return Err(Undecoded::Malformed);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use base64::Engine as _;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use proptest::prelude::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    const MIB: usize = 1 << 20;

    fn gz(text: &[u8], level: u32) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn zlib(text: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::new(6));
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn bare(text: &[u8]) -> Vec<u8> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(6));
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn br(text: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer = brotli::CompressorWriter::new(&mut out, 4096, 5, 20);
        writer.write_all(text).unwrap();
        drop(writer);
        out
    }

    fn zst(text: &[u8]) -> Vec<u8> {
        compress_to_vec(text, CompressionLevel::Fastest)
    }

    fn base64(text: &str) -> Vec<u8> {
        base64::engine::general_purpose::STANDARD.decode(text).unwrap()
    }

    /// Every way to write one text: name, coding, bytes.
    fn ways(text: &[u8]) -> Vec<(&'static str, Coding, Vec<u8>)> {
        vec![
            ("gzip", Coding::Gzip, gz(text, 6)),
            ("gzip, stored", Coding::Gzip, gz(text, 0)),
            ("zlib", Coding::Deflate, zlib(text)),
            ("bare deflate", Coding::Deflate, bare(text)),
            ("br", Coding::Brotli, br(text)),
            ("zstd", Coding::Zstd, zst(text)),
        ]
    }

    fn long() -> Vec<u8> {
        (0..60_000_u32).flat_map(|n| (n * n % 1009).to_string().into_bytes()).collect()
    }

    #[test]
    fn what_was_encoded_comes_back_in_every_coding() {
        for text in [&b""[..], b"{}", &long(), &vec![0; 3 * MIB]] {
            for (name, coding, bytes) in ways(text) {
                assert_eq!(decode(&[coding], &bytes, 4 * MIB).as_deref(), Ok(text), "{name}");
                // Exactly the limit is within it.
                assert_eq!(decode(&[coding], &bytes, text.len()).as_deref(), Ok(text), "{name}");
            }
        }
    }

    #[test]
    fn what_other_programs_wrote_is_read() {
        let repeated = b"{\"a\":1}".repeat(100);
        // `zstd -3` from a pipe, with its checksum.
        let zstd = base64("KLUv/QRYdQAAOHsiYSI6MX0BALJUFSNPJNg+");
        assert_eq!(decode(&[Coding::Zstd], &zstd, MIB).as_deref(), Ok(&repeated[..]));
        let mut damaged = zstd.clone();
        *damaged.last_mut().unwrap() ^= 1;
        assert_eq!(decode(&[Coding::Zstd], &damaged, MIB), Err(Undecoded::Malformed));
    }

    #[test]
    fn one_byte_above_the_limit_is_too_large() {
        for (name, coding, bytes) in ways(&long()) {
            let limit = long().len() - 1;
            assert_eq!(decode(&[coding], &bytes, limit), Err(Undecoded::TooLarge), "{name}");
        }
        assert_eq!(decode(&[], b"abc", 2), Err(Undecoded::TooLarge));
        assert_eq!(decode(&[], b"abc", 3).as_deref(), Ok(&b"abc"[..]));
    }

    #[test]
    fn a_bomb_costs_no_more_than_the_limit() {
        for (name, coding, bytes) in ways(&vec![0; 64 * MIB]) {
            assert!(bytes.len() < MIB || name == "gzip, stored");
            assert_eq!(decode(&[coding], &bytes, MIB), Err(Undecoded::TooLarge), "{name}");
        }
        // Bombs in bombs: the limit holds at each step.
        let bomb = gz(&gz(&vec![0; 64 * MIB], 9), 9);
        assert_eq!(decode(&[Coding::Gzip, Coding::Gzip], &bomb, MIB), Err(Undecoded::TooLarge));
    }

    #[test]
    fn what_is_cut_goes_on_or_is_damaged_is_not_decoded() {
        for (name, coding, bytes) in ways(&long()[..2000]) {
            for len in 0..bytes.len() {
                assert!(decode(&[coding], &bytes[..len], MIB).is_err(), "{name} cut to {len}");
            }
            for garbage in [&b"x"[..], b"\0\0\0\0"] {
                let longer = [&bytes, garbage].concat();
                let got = decode(&[coding], &longer, MIB);
                assert_eq!(got, Err(Undecoded::Malformed), "{name} and {garbage:?}");
            }
            assert!(decode(&[coding], b"{\"a\":1}", MIB).is_err(), "{name} in name only");
        }
        // A wrong checksum.
        for (coding, mut bytes) in
            [(Coding::Gzip, gz(&long(), 6)), (Coding::Deflate, zlib(&long()))]
        {
            let at = bytes.len() - if coding == Coding::Gzip { 8 } else { 4 };
            bytes[at] ^= 1;
            assert_eq!(decode(&[coding], &bytes, MIB), Err(Undecoded::Malformed), "{coding:?}");
        }
    }

    #[test]
    fn members_and_frames_are_one_text_and_not_without_end() {
        for (coding, make) in
            [(Coding::Gzip, (|text| gz(text, 6)) as fn(&[u8]) -> Vec<u8>), (Coding::Zstd, zst)]
        {
            let two = [make(b"{\"a\":"), make(b""), make(b"1}")].concat();
            assert_eq!(decode(&[coding], &two, MIB).as_deref(), Ok(&b"{\"a\":1}"[..]));
            let many = make(b"").repeat(MEMBERS_MAX);
            assert_eq!(decode(&[coding], &many, MIB).as_deref(), Ok(&b""[..]));
            let more = make(b"").repeat(MEMBERS_MAX + 1);
            assert_eq!(decode(&[coding], &more, MIB), Err(Undecoded::TooLarge));
        }
        let skipped = [&b"\x50\x2a\x4d\x18\x03\0\0\0abc"[..], &zst(b"{}")].concat();
        assert_eq!(decode(&[Coding::Zstd], &skipped, MIB).as_deref(), Ok(&b"{}"[..]));
        let beyond = b"\x50\x2a\x4d\x18\xff\xff\xff\xffabc";
        assert_eq!(decode(&[Coding::Zstd], beyond, MIB), Err(Undecoded::Malformed));
    }

    #[test]
    fn a_window_that_would_eat_the_memory_is_refused() {
        // Frame header: no single segment, window descriptor of 16 MiB, then an empty last block.
        let wide = b"\x28\xb5\x2f\xfd\x00\x70\x01\0\0";
        assert_eq!(decode(&[Coding::Zstd], wide, MIB), Err(Undecoded::TooLarge));
        let allowed = b"\x28\xb5\x2f\xfd\x00\x68\x01\0\0";
        assert_eq!(decode(&[Coding::Zstd], allowed, MIB).as_deref(), Ok(&b""[..]));
        // The large-window form of br, beyond RFC 7932: window bits 30.
        let large = b"\x11\x1e\x03";
        assert_eq!(decode(&[Coding::Brotli], large, MIB), Err(Undecoded::Malformed));
    }

    #[test]
    fn the_header_names_codings_in_their_order() {
        let read = |lines: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(CONTENT_ENCODING, line.parse().unwrap());
            }
            codings(&headers)
        };
        assert_eq!(read(&[]), Ok(vec![]));
        assert_eq!(read(&["identity"]), Ok(vec![]));
        assert_eq!(read(&["GZip"]), Ok(vec![Coding::Gzip]));
        assert_eq!(
            read(&["x-gzip , br", "identity, deflate,, zstd"]),
            Ok(vec![Coding::Gzip, Coding::Brotli, Coding::Deflate, Coding::Zstd])
        );
        for unknown in ["compress", "gzip;q=1", "gzip br", "gzip, what", "br,br,br,br,br"] {
            assert_eq!(read(&[unknown]), Err(Undecoded::Unknown), "{unknown}");
        }
        let twice = br(&gz(b"{}", 6));
        assert_eq!(decode(&[Coding::Gzip, Coding::Brotli], &twice, MIB).as_deref(), Ok(&b"{}"[..]));
        assert!(decode(&[Coding::Brotli, Coding::Gzip], &twice, MIB).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic_or_go_beyond_the_limit(
            text in prop::collection::vec(any::<u8>(), 0..300),
            at in any::<prop::sample::Index>(),
            to in any::<u8>(),
        ) {
            for (_, coding, mut bytes) in ways(&text) {
                prop_assert_eq!(decode(&[coding], &bytes, MIB), Ok(text.clone()));
                *at.get_mut(&mut bytes) = to;
                if let Ok(decoded) = decode(&[coding], &bytes, 1000) {
                    prop_assert!(decoded.len() <= 1000);
                }
                let plain = decode(&[coding], &text, 1000);
                prop_assert!(plain.is_err() || plain.unwrap().len() <= 1000);
            }
        }
    }
}
