//! Bearer tokens: checks a signed JWT (RFC 7515, 7519, 8725) with given keys, and reads its claims only after that.
//!
//! Invariants:
//!
//! - The configuration must name the algorithm, and it must fit the kind of the key. A token only chooses among these. `none`
//!   does
//!   not exist, and a public key is never used as the secret of an HMAC.
//! - A claim of a wrong type makes the token invalid. It never counts as absent.
//! - A token cannot say where a key comes from. Its `kid` is only compared with the known keys.
//!
//! Pure: keys and time are arguments.

use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::{hmac, signature};
use serde_json::{Map, Value};

use crate::fingerprint::json::Tree;

/// Longest token, in bytes.
const TOKEN_MAX: usize = 16 * 1024;
/// Most keys of a set; further ones are left out.
const KEYS_MAX: usize = 100;
/// Most keys that one token is tried with: keys of one `kid`.
const TRIES_MAX: usize = 4;
/// Shortest modulus of an RSA key, in bytes: 2048 bits.
const RSA_MIN: usize = 256;
/// Longest subject or tenant that is read from a token, in bytes.
const CLAIM_MAX: usize = 255;

/// How a token may be signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// HMAC with SHA-256.
    Hs256,
    /// HMAC with SHA-384.
    Hs384,
    /// HMAC with SHA-512.
    Hs512,
    /// RSA, PKCS #1 1.5, with SHA-256.
    Rs256,
    /// RSA, PKCS #1 1.5, with SHA-384.
    Rs384,
    /// RSA, PKCS #1 1.5, with SHA-512.
    Rs512,
    /// RSA, PSS, with SHA-256.
    Ps256,
    /// RSA, PSS, with SHA-384.
    Ps384,
    /// RSA, PSS, with SHA-512.
    Ps512,
    /// ECDSA on P-256 with SHA-256.
    Es256,
    /// ECDSA on P-384 with SHA-384.
    Es384,
    /// Ed25519.
    EdDsa,
}

/// The algorithms with their kind of key.
enum Scheme {
    Hmac(hmac::Algorithm),
    Rsa(&'static signature::RsaParameters),
    Point(Curve, &'static dyn signature::VerificationAlgorithm),
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Hs256,
        Self::Hs384,
        Self::Hs512,
        Self::Rs256,
        Self::Rs384,
        Self::Rs512,
        Self::Ps256,
        Self::Ps384,
        Self::Ps512,
        Self::Es256,
        Self::Es384,
        Self::EdDsa,
    ];

    /// Its name in a token (RFC 7518).
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hs256 => "HS256",
            Self::Hs384 => "HS384",
            Self::Hs512 => "HS512",
            Self::Rs256 => "RS256",
            Self::Rs384 => "RS384",
            Self::Rs512 => "RS512",
            Self::Ps256 => "PS256",
            Self::Ps384 => "PS384",
            Self::Ps512 => "PS512",
            Self::Es256 => "ES256",
            Self::Es384 => "ES384",
            Self::EdDsa => "EdDSA",
        }
    }

    /// Finds an algorithm by its exact name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.as_str() == name)
    }

    fn scheme(self) -> Scheme {
        match self {
            Self::Hs256 => Scheme::Hmac(hmac::HMAC_SHA256),
            Self::Hs384 => Scheme::Hmac(hmac::HMAC_SHA384),
            Self::Hs512 => Scheme::Hmac(hmac::HMAC_SHA512),
            Self::Rs256 => Scheme::Rsa(&signature::RSA_PKCS1_2048_8192_SHA256),
            Self::Rs384 => Scheme::Rsa(&signature::RSA_PKCS1_2048_8192_SHA384),
            Self::Rs512 => Scheme::Rsa(&signature::RSA_PKCS1_2048_8192_SHA512),
            Self::Ps256 => Scheme::Rsa(&signature::RSA_PSS_2048_8192_SHA256),
            Self::Ps384 => Scheme::Rsa(&signature::RSA_PSS_2048_8192_SHA384),
            Self::Ps512 => Scheme::Rsa(&signature::RSA_PSS_2048_8192_SHA512),
            Self::Es256 => Scheme::Point(Curve::P256, &signature::ECDSA_P256_SHA256_FIXED),
            Self::Es384 => Scheme::Point(Curve::P384, &signature::ECDSA_P384_SHA384_FIXED),
            Self::EdDsa => Scheme::Point(Curve::Ed25519, &signature::ED25519),
        }
    }

    /// Shortest secret that RFC 7518, 3.2 allows; for the other kinds nothing.
    fn secret_min(self) -> usize {
        match self.scheme() {
            Scheme::Hmac(hash) => hash.digest_algorithm().output_len(),
            Scheme::Rsa(_) | Scheme::Point(..) => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Curve {
    P256,
    P384,
    Ed25519,
}

impl Curve {
    /// How long a public key is: an uncompressed point, or the bare key.
    fn length(self) -> usize {
        match self {
            Self::P256 => 65,
            Self::P384 => 97,
            Self::Ed25519 => 32,
        }
    }
}

#[derive(Clone, PartialEq, Eq)]
enum Material {
    Secret(Vec<u8>),
    Rsa { modulus: Vec<u8>, exponent: Vec<u8> },
    Point(Curve, Vec<u8>),
}

/// One key.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    id: Option<String>,
    /// The only algorithm of this key, if it names one.
    only: Option<Algorithm>,
    material: Material,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Key {
    /// The secret of an HMAC.
    #[must_use]
    pub fn secret(bytes: &[u8]) -> Self {
        Self { id: None, only: None, material: Material::Secret(bytes.to_vec()) }
    }

    /// A public key as in `BEGIN PUBLIC KEY`: a DER SubjectPublicKeyInfo. `None`: it is not one, or of an unsupported kind.
    #[must_use]
    pub fn public(der: &[u8]) -> Option<Self> {
        Some(Self { id: None, only: None, material: spki(der)? })
    }

    /// Whether this key may check a token with this `algorithm`.
    #[must_use]
    pub fn fits(&self, algorithm: Algorithm) -> bool {
        let kind = match (algorithm.scheme(), &self.material) {
            (Scheme::Hmac(_), Material::Secret(secret)) => secret.len() >= algorithm.secret_min(),
            (Scheme::Rsa(_), Material::Rsa { .. }) => true,
            (Scheme::Point(curve, _), Material::Point(own, _)) => curve == *own,
            (
                Scheme::Hmac(_) | Scheme::Rsa(_) | Scheme::Point(..),
                Material::Secret(_) | Material::Rsa { .. } | Material::Point(..),
            ) => false,
        };
        kind && self.only.is_none_or(|only| only == algorithm)
    }

    fn signed(&self, algorithm: Algorithm, message: &[u8], signature: &[u8]) -> bool {
        if !self.fits(algorithm) {
            return false;
        }
        match (algorithm.scheme(), &self.material) {
            (Scheme::Hmac(hash), Material::Secret(secret)) => {
                hmac::verify(&hmac::Key::new(hash, secret), message, signature).is_ok()
            }
            (Scheme::Rsa(parameters), Material::Rsa { modulus, exponent }) => {
                let key = signature::RsaPublicKeyComponents { n: modulus, e: exponent };
                key.verify(parameters, message, signature).is_ok()
            }
            (Scheme::Point(_, check), Material::Point(_, point)) => {
                signature::UnparsedPublicKey::new(check, point).verify(message, signature).is_ok()
            }
            (
                Scheme::Hmac(_) | Scheme::Rsa(_) | Scheme::Point(..),
                Material::Secret(_) | Material::Rsa { .. } | Material::Point(..),
            ) => false,
        }
    }
}

/// All keys that are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys(Vec<Key>);

impl Keys {
    /// One key for all tokens, whatever their `kid`.
    #[must_use]
    pub fn one(key: Key) -> Self {
        Self(vec![key])
    }

    /// Whether any of them fits one of the algorithms.
    #[must_use]
    pub fn fit(&self, algorithms: &[Algorithm]) -> bool {
        self.0.iter().any(|key| algorithms.iter().any(|algorithm| key.fits(*algorithm)))
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Reads a JWK set (RFC 7517). Returns also the keys that were left out, and why. A set without any key is allowed: no
    /// token is valid then.
    ///
    /// # Errors
    /// It is no such set.
    pub fn read(text: &[u8]) -> Result<(Self, Vec<String>), String> {
        const NO_SET: &str = "is no JWK set: a JSON object with a list `keys`";
        let set: Value = serde_json::from_slice(text).map_err(|_| NO_SET.to_owned())?;
        let list = set.get("keys").and_then(Value::as_array).ok_or_else(|| NO_SET.to_owned())?;
        let (mut keys, mut left_out) = (Vec::new(), Vec::new());
        for (place, key) in list.iter().enumerate() {
            match jwk(key) {
                Ok(_) if keys.len() >= KEYS_MAX => {
                    left_out.push(format!("keys[{place}]: there are more than {KEYS_MAX}"));
                    break;
                }
                Ok(key) => keys.push(key),
                Err(why) => left_out.push(format!("keys[{place}]: {why}")),
            }
        }
        Ok((Self(keys), left_out))
    }
}

fn member<'k>(key: &'k Value, name: &str) -> Result<Option<&'k str>, String> {
    match key.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_str().map(Some).ok_or_else(|| format!("{name} is no text")),
    }
}

fn jwk(key: &Value) -> Result<Key, String> {
    let bytes = |name: &str| -> Result<Vec<u8>, String> {
        let text = member(key, name)?.ok_or_else(|| format!("has no {name}"))?;
        URL_SAFE_NO_PAD.decode(text).map_err(|_| format!("{name} is no base64url"))
    };
    if member(key, "use")?.is_some_and(|purpose| purpose != "sig") {
        return Err("is not for signatures".to_owned());
    }
    let checks = key.get("key_ops").and_then(Value::as_array);
    if checks.is_some_and(|uses| !uses.iter().any(|one| one == "verify")) {
        return Err("is not for checking signatures".to_owned());
    }
    let point = |curve: Curve| -> Result<Material, String> {
        let mut point = if curve == Curve::Ed25519 { Vec::new() } else { vec![4] };
        point.extend(bytes("x")?);
        if curve != Curve::Ed25519 {
            point.extend(bytes("y")?);
        }
        if point.len() != curve.length() {
            return Err("is no point of its curve".to_owned());
        }
        Ok(Material::Point(curve, point))
    };
    let material = match (member(key, "kty")?, member(key, "crv")?) {
        (Some("RSA"), _) => rsa(&bytes("n")?, &bytes("e")?).ok_or("has fewer than 2048 bits")?,
        (Some("EC"), Some("P-256")) => point(Curve::P256)?,
        (Some("EC"), Some("P-384")) => point(Curve::P384)?,
        (Some("OKP"), Some("Ed25519")) => point(Curve::Ed25519)?,
        (Some("oct"), _) => {
            return Err("is a secret; secrets are not taken from a set of public keys".to_owned());
        }
        (Some(_) | None, _) => return Err("is of a kind that is not known here".to_owned()),
    };
    let only = match member(key, "alg")? {
        None => None,
        Some(name) => Some(Algorithm::parse(name).ok_or("is for an algorithm not known here")?),
    };
    let key = Key { id: member(key, "kid")?.map(str::to_owned), only, material };
    let useful = Algorithm::ALL.into_iter().any(|algorithm| key.fits(algorithm));
    useful.then_some(key).ok_or_else(|| "is for an algorithm of another kind of key".to_owned())
}

fn rsa(modulus: &[u8], exponent: &[u8]) -> Option<Material> {
    let bare = |number: &[u8]| {
        let start = number.iter().position(|byte| *byte != 0).unwrap_or(number.len());
        number.get(start..).unwrap_or_default().to_vec()
    };
    let (modulus, exponent) = (bare(modulus), bare(exponent));
    (modulus.len() >= RSA_MIN).then_some(Material::Rsa { modulus, exponent })
}

/// One DER element of this tag: its content, and what follows it.
fn der(input: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (first, rest) = input.split_first()?;
    let (short, rest) = rest.split_first()?;
    if *first != tag {
        return None;
    }
    let (length, rest) = match *short {
        short @ 0..=0x7f => (usize::from(short), rest),
        long @ 0x81..=0x82 => {
            let (digits, rest) = rest.split_at_checked(usize::from(long & 0x7f))?;
            (digits.iter().fold(0, |sum, digit| sum * 256 + usize::from(*digit)), rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

/// SubjectPublicKeyInfo (RFC 5280, 4.1) of RSA, P-256, P-384 and Ed25519.
fn spki(input: &[u8]) -> Option<Material> {
    const SEQUENCE: u8 = 0x30;
    const OID: u8 = 0x06;
    const INTEGER: u8 = 0x02;
    const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
    const EC: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
    const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
    const P384: &[u8] = &[0x2b, 0x81, 0x04, 0x00, 0x22];
    const ED25519: &[u8] = &[0x2b, 0x65, 0x70];
    let (all, []) = der(input, SEQUENCE)? else { return None };
    let (algorithm, rest) = der(all, SEQUENCE)?;
    let (bits, []) = der(rest, 0x03)? else { return None };
    // The first byte counts unused bits: none.
    let [0, key @ ..] = bits else { return None };
    let (name, parameters) = der(algorithm, OID)?;
    let curve = match name {
        RSA => {
            let (numbers, []) = der(key, SEQUENCE)? else { return None };
            let (modulus, rest) = der(numbers, INTEGER)?;
            let (exponent, []) = der(rest, INTEGER)? else { return None };
            return rsa(modulus, exponent);
        }
        EC => match der(parameters, OID)? {
            (P256, []) => Curve::P256,
            (P384, []) => Curve::P384,
            _ => return None,
        },
        ED25519 => Curve::Ed25519,
        _ => return None,
    };
    (key.len() == curve.length()).then(|| Material::Point(curve, key.to_vec()))
}

/// The requirements for a token besides its signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The allowed algorithms.
    pub algorithms: Vec<Algorithm>,
    /// Its `iss`.
    pub issuer: String,
    /// One of these is in its `aud`.
    pub audiences: Vec<String>,
    /// How far the clocks of issuer and gateway may differ.
    pub leeway: Duration,
}

/// Why a token is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenError {
    /// It is not valid. The text follows "the token".
    Invalid(&'static str),
    /// It names a key that is not known. It may be valid.
    KeyUnknown,
}

/// A token that was checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Claims(Map<String, Value>);

/// Checks a token's signature and claims. `now`: since 1970.
///
/// # Errors
/// See [`TokenError`].
pub fn verify(text: &str, keys: &Keys, rules: &Rules, now: Duration) -> Result<Claims, TokenError> {
    const MALFORMED: TokenError = TokenError::Invalid("is no signed JWT");
    if text.len() > TOKEN_MAX {
        return Err(TokenError::Invalid("is too long"));
    }
    let (message, signature) = text.rsplit_once('.').ok_or(MALFORMED)?;
    let (head, payload) = message.split_once('.').ok_or(MALFORMED)?;
    let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| MALFORMED);
    let head = object(&decode(head)?).ok_or(MALFORMED)?;
    let (payload, signature) = (decode(payload)?, decode(signature)?);
    let algorithm = head.get("alg").and_then(Value::as_str).and_then(Algorithm::parse);
    let algorithm = algorithm.filter(|algorithm| rules.algorithms.contains(algorithm));
    let algorithm = algorithm
        .ok_or(TokenError::Invalid("is not signed by an algorithm that is accepted here"))?;
    if head.contains_key("crit") {
        return Err(TokenError::Invalid("asks for an extension that is not known here"));
    }
    if !head.get("typ").is_none_or(is_access) {
        return Err(TokenError::Invalid("is of another kind than an access token"));
    }
    let candidates = candidates(keys, algorithm, head.get("kid"))?;
    let signed = |key: &&Key| key.signed(algorithm, message.as_bytes(), &signature);
    if !candidates.iter().any(signed) {
        return Err(TokenError::Invalid("has a signature that does not fit"));
    }
    let claims = object(&payload).ok_or(MALFORMED)?;
    check(&claims, rules, now).map_err(TokenError::Invalid)?;
    Ok(Claims(claims))
}

/// A JSON object without a repeated name.
fn object(text: &[u8]) -> Option<Map<String, Value>> {
    Tree::parse(text)?;
    match serde_json::from_slice(text).ok()? {
        Value::Object(members) => Some(members),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            None
        }
    }
}

/// `JWT`, or `at+jwt` of RFC 9068, each also as a media type. Other kinds of JWT are not access tokens (RFC 8725, 3.11).
fn is_access(kind: &Value) -> bool {
    let Some(kind) = kind.as_str() else { return false };
    let kind = kind.to_ascii_lowercase();
    matches!(kind.strip_prefix("application/").unwrap_or(&kind), "jwt" | "at+jwt")
}

/// The keys that a token may be checked with.
fn candidates<'k>(
    keys: &'k Keys,
    algorithm: Algorithm,
    named: Option<&Value>,
) -> Result<Vec<&'k Key>, TokenError> {
    let fitting: Vec<&Key> = keys.0.iter().filter(|key| key.fits(algorithm)).collect();
    let named = match named {
        Some(Value::String(name)) => Some(name.as_str()),
        Some(_) => return Err(TokenError::Invalid("names its key by something that is no text")),
        None => None,
    };
    match (named, fitting.as_slice()) {
        // A single key without a name comes from a file and is for all tokens.
        (_, [only]) if only.id.is_none() => Ok(fitting),
        (None, [_]) => Ok(fitting),
        (None, []) => Err(TokenError::KeyUnknown),
        (None, [_, _, ..]) => Err(TokenError::Invalid("does not say which key it is signed with")),
        (Some(name), _) => {
            let own = fitting.into_iter().filter(|key| key.id.as_deref() == Some(name));
            let own: Vec<&Key> = own.take(TRIES_MAX).collect();
            if own.is_empty() { Err(TokenError::KeyUnknown) } else { Ok(own) }
        }
    }
}

fn check(claims: &Map<String, Value>, rules: &Rules, now: Duration) -> Result<(), &'static str> {
    // Seconds since 1970, perhaps with a fraction (RFC 7519, 2). A text of digits is none.
    let time = |name: &str| match claims.get(name) {
        None => Ok(None),
        Some(Value::Number(number)) => Ok(number.as_f64()),
        Some(_) => Err("has a time that is no number"),
    };
    let (now, leeway) = (now.as_secs_f64(), rules.leeway.as_secs_f64());
    let expires = time("exp")?.ok_or("does not say when it expires")?;
    if now >= expires + leeway {
        return Err("has expired");
    }
    if time("nbf")?.is_some_and(|begins| now + leeway < begins) {
        return Err("is not valid yet");
    }
    if claims.get("iss").and_then(Value::as_str) != Some(rules.issuer.as_str()) {
        return Err("is of another issuer");
    }
    let known = |audience: &Value| {
        audience.as_str().is_some_and(|name| rules.audiences.iter().any(|known| known == name))
    };
    let meant = match claims.get("aud") {
        Some(Value::Array(list)) => list.iter().any(known),
        Some(one) => known(one),
        None => false,
    };
    if !meant {
        return Err("is meant for another audience");
    }
    if claims.get("sub").is_some_and(|subject| !subject.is_string()) {
        return Err("has a subject that is no text");
    }
    Ok(())
}

/// The place of a claim: a name at the top level, or a JSON pointer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimPath(Vec<String>);

impl ClaimPath {
    /// `tenant_id`, or `/org/id` (RFC 6901) for a nested claim. A name may contain dots and colons.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let plain = |part: &str| part.replace("~1", "/").replace("~0", "~");
        let parts: Vec<String> = match text.strip_prefix('/') {
            Some(pointer) => pointer.split('/').map(plain).collect(),
            None => vec![text.to_owned()],
        };
        parts.iter().all(|part| !part.is_empty()).then_some(Self(parts))
    }
}

impl Claims {
    /// The subject, if it has a form that can be stored.
    #[must_use]
    pub fn subject(&self) -> Option<&str> {
        let subject = self.0.get("sub").and_then(Value::as_str)?;
        let plain = !subject.trim().is_empty() && !subject.chars().any(char::is_control);
        (plain && subject.len() <= CLAIM_MAX).then_some(subject)
    }

    /// A claim that is a text or a whole number, as text. The number 7 and the text "7" are the same tenant, because the
    /// issuer decides on both.
    ///
    /// # Errors
    /// There is no such claim, or it is something else.
    pub fn text(&self, path: &ClaimPath) -> Result<String, &'static str> {
        let (first, deeper) = path.0.split_first().ok_or("the token has no such claim")?;
        let mut value = self.0.get(first);
        for name in deeper {
            value = value.and_then(|value| value.get(name));
        }
        match value {
            None | Some(Value::Null) => Err("the token has no such claim"),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(Value::Number(number)) if number.is_i64() || number.is_u64() => {
                Ok(number.to_string())
            }
            Some(_) => Err("the claim is neither a text nor a whole number"),
        }
    }
}

#[cfg(test)]
mod tests;
