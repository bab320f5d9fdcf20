//! The keys of what is sealed at rest, and sealing itself: AES-256-GCM under a random nonce.
//!
//! What must stay true:
//!
//! - What is sealed names its key, so that keys can be rotated: the first of the file seals, all of them open.
//! - What is sealed is bound to its place (which record or event, and what of it): moved elsewhere it does not open.
//! - Nothing that is not sealed is taken for sealed: a sealed value begins with [`MARK`], which no JSON text does, and an
//!   answer says by a header of the gateway's own that its headers and body are.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use uuid::Uuid;

/// Begins what is sealed.
pub(super) const MARK: u8 = 1;
/// Goes up with the format.
const CONTEXT: &[u8] = b"oncegate-seal-1";
/// Longest name of a key.
const ID_MAX: usize = 32;

/// What of a record or event is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The answer's headers.
    Headers = 1,
    /// The answer's body.
    Body = 2,
    /// What was kept of the request.
    Context = 3,
    /// An event's message.
    Payload = 4,
}

/// The keys of a key file: the first seals, all of them open. Without any, nothing is sealed, and nothing sealed opens.
pub struct Keys {
    keys: Vec<Key>,
    random: SystemRandom,
}

struct Key {
    id: String,
    key: LessSafeKey,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ids()).finish()
    }
}

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file cannot be read.
    #[error("cannot read {}: {cause}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// A line is not a key.
    #[error(
        "{}, line {line}: {what}; a line is a name, a space, and 32 bytes in base64, such as the output of `head -c 32 /dev/urandom | base64`",
        path.display()
    )]
    Line {
        /// Of which file.
        path: PathBuf,
        /// Which, from 1.
        line: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// There is none.
    #[error("{} holds no key", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
}

/// Why something sealed does not open.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unopened {
    /// Its key is not there.
    #[error(
        "it is sealed with the key {0:?}: put that key into the file of store.encryption_key_file"
    )]
    NoKey(String),
    /// It is not what was sealed here, or not with this key.
    #[error(
        "it does not open: it was changed, or moved, or its key's name stands for another key now"
    )]
    Damaged,
}

/// The system has no random bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system gives no random bytes")]
pub(super) struct NoRandom;

impl Keys {
    /// Reads a key file. Blank lines and lines that begin with `#` say nothing.
    ///
    /// # Errors
    /// [`KeysError`]: which line, what is wrong with it, and how it should look.
    pub fn read(path: &Path) -> Result<Self, KeysError> {
        let text = std::fs::read_to_string(path)
            .map_err(|cause| KeysError::Unreadable { path: path.to_owned(), cause })?;
        let mut keys: Vec<Key> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let key = read_line(line).and_then(|key| {
                let is_twin = keys.iter().any(|other| other.id == key.id);
                if is_twin { Err("the name stands for another key already") } else { Ok(key) }
            });
            let wrong = |what| KeysError::Line { path: path.to_owned(), line: number + 1, what };
            keys.push(key.map_err(wrong)?);
        }
        if keys.is_empty() {
            return Err(KeysError::Empty { path: path.to_owned() });
        }
        Ok(Self { keys, random: SystemRandom::new() })
    }

    /// No keys.
    #[must_use]
    pub fn none() -> Self {
        Self { keys: Vec::new(), random: SystemRandom::new() }
    }

    /// The names of the keys; the first one seals.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.keys.iter().map(|key| key.id.as_str())
    }

    /// The key that seals.
    pub(super) fn sealing(&self) -> Option<Sealing<'_>> {
        self.keys.first().map(|key| Sealing { key, random: &self.random })
    }

    /// Opens what [`Sealing::seal`] made for the same place.
    pub(super) fn open(&self, part: Part, of: Uuid, sealed: &[u8]) -> Result<Vec<u8>, Unopened> {
        let (id, rest) = split(sealed).ok_or(Unopened::Damaged)?;
        let (nonce, rest) = rest.split_first_chunk::<NONCE_LEN>().ok_or(Unopened::Damaged)?;
        let Some(Key { key, .. }) = self.keys.iter().find(|key| key.id.as_bytes() == id) else {
            return Err(Unopened::NoKey(String::from_utf8_lossy(id).into_owned()));
        };
        let mut plain = rest.to_vec();
        let bound = Aad::from(place(part, of));
        let opened = key.open_in_place(Nonce::assume_unique_for_key(*nonce), bound, &mut plain);
        let length = opened.map_err(|_| Unopened::Damaged)?.len();
        plain.truncate(length);
        Ok(plain)
    }
}

/// The first key.
#[derive(Clone, Copy)]
pub(super) struct Sealing<'a> {
    key: &'a Key,
    random: &'a SystemRandom,
}

impl Sealing<'_> {
    /// Seals a part of what has this id.
    pub(super) fn seal(self, part: Part, of: Uuid, plain: &[u8]) -> Result<Vec<u8>, NoRandom> {
        let Key { id, key } = self.key;
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).map_err(|_| NoRandom)?;
        let length = u8::try_from(id.len()).map_err(|_| NoRandom)?;
        let mut sealed = plain.to_vec();
        let bound = Aad::from(place(part, of));
        // It fails only beyond 64 GiB.
        let nonce_used = Nonce::assume_unique_for_key(nonce);
        key.seal_in_place_append_tag(nonce_used, bound, &mut sealed).map_err(|_| NoRandom)?;
        let mut out = Vec::with_capacity(2 + id.len() + NONCE_LEN + sealed.len());
        out.extend([MARK, length]);
        out.extend(id.as_bytes());
        out.extend(nonce);
        out.extend(sealed);
        Ok(out)
    }
}

/// The key's name in something sealed, and what follows it.
fn split(sealed: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&mark, rest) = sealed.split_first()?;
    let (&length, rest) = rest.split_first()?;
    if mark != MARK {
        return None;
    }
    rest.split_at_checked(length.into())
}

/// To what something sealed is bound.
fn place(part: Part, of: Uuid) -> Vec<u8> {
    [CONTEXT, &[part as u8], of.as_bytes()].concat()
}

fn read_line(line: &str) -> Result<Key, &'static str> {
    let (id, key) = line.split_once(char::is_whitespace).ok_or("the key is missing")?;
    let names = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if id.len() > ID_MAX || !id.bytes().all(names) {
        return Err("the name has at most 32 letters, digits, '-', '_' and '.'");
    }
    let bytes = STANDARD.decode(key.trim()).map_err(|_| "the key is not base64")?;
    let key = UnboundKey::new(&AES_256_GCM, &bytes).map_err(|_| "the key is not 32 bytes long")?;
    // A file of zeros, or of one letter: everybody's first guess.
    if bytes.iter().all(|byte| Some(byte) == bytes.first()) {
        return Err("the key is one byte 32 times, and no secret");
    }
    Ok(Key { id: id.to_owned(), key: LessSafeKey::new(key) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "old t6+PWSJLNKRNL9xASWhknGA1XmJhdCpWM8Jps3Oc5RM=";
    const NEW: &str = "new nHfs1+zsolQKwtw3LCILVehB1Rttw3o218uzijnJDMI=";

    fn keys(lines: &[&str]) -> Result<Keys, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines.join("\n")).unwrap();
        Keys::read(file.path())
            .map_err(|error| error.to_string().replace(&file.path().display().to_string(), "FILE"))
    }

    #[test]
    fn what_is_sealed_opens_in_its_place_only() {
        let keys = keys(&["# ours", "", NEW]).unwrap();
        let (id, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let sealed = keys.sealing().unwrap().seal(Part::Body, id, b"secret").unwrap();
        assert!(!sealed.windows(6).any(|window| window == b"secret"));
        assert_eq!(keys.open(Part::Body, id, &sealed).unwrap(), b"secret");
        assert_eq!(keys.open(Part::Body, other, &sealed), Err(Unopened::Damaged));
        assert_eq!(keys.open(Part::Headers, id, &sealed), Err(Unopened::Damaged));
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(keys.open(Part::Body, id, &changed).is_err(), "byte {at}");
            assert!(keys.open(Part::Body, id, &sealed[..at]).is_err(), "cut at {at}");
        }
        assert_ne!(
            keys.sealing().unwrap().seal(Part::Body, id, b"secret").unwrap(),
            sealed,
            "a nonce of its own"
        );
    }

    #[test]
    fn the_first_key_seals_and_all_of_them_open() {
        let id = Uuid::from_u128(1);
        let before = keys(&[OLD]).unwrap();
        let during = keys(&[NEW, OLD]).unwrap();
        let after = keys(&[NEW]).unwrap();
        let sealed = before.sealing().unwrap().seal(Part::Payload, id, b"{}").unwrap();
        assert_eq!(during.open(Part::Payload, id, &sealed).unwrap(), b"{}");
        assert_eq!(after.open(Part::Payload, id, &sealed), Err(Unopened::NoKey("old".into())));
        let sealed = during.sealing().unwrap().seal(Part::Payload, id, b"{}").unwrap();
        assert_eq!(after.open(Part::Payload, id, &sealed).unwrap(), b"{}");
        assert!(Keys::none().sealing().is_none());
        assert_eq!(
            Keys::none().open(Part::Payload, id, &sealed),
            Err(Unopened::NoKey("new".into()))
        );
        assert_eq!(during.ids().collect::<Vec<_>>(), ["new", "old"]);
    }

    #[test]
    fn a_bad_key_file_is_refused_by_line() {
        let how = "; a line is a name, a space, and 32 bytes in base64, such as the output of `head -c 32 /dev/urandom | base64`";
        for (lines, wrong) in [
            (&["# nothing"][..], "FILE holds no key".to_owned()),
            (&["k"], format!("FILE, line 1: the key is missing{how}")),
            (&[NEW, "k AAAA"], format!("FILE, line 2: the key is not 32 bytes long{how}")),
            (
                &["k AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="],
                format!("FILE, line 1: the key is one byte 32 times, and no secret{how}"),
            ),
            (
                &["k QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE="],
                format!("FILE, line 1: the key is one byte 32 times, and no secret{how}"),
            ),
            (&["k !"], format!("FILE, line 1: the key is not base64{how}")),
            (
                &["a/b AAAA"],
                format!(
                    "FILE, line 1: the name has at most 32 letters, digits, '-', '_' and '.'{how}"
                ),
            ),
            (&[NEW, NEW], format!("FILE, line 2: the name stands for another key already{how}")),
        ] {
            assert_eq!(keys(lines).unwrap_err(), wrong);
        }
    }
}
