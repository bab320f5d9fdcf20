//! Good tokens of every kind, and each way in which one can be bad.

use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair,
    EcdsaSigningAlgorithm, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256, RSA_PSS_SHA512,
    RsaEncoding, RsaKeyPair,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use serde_json::json;

use super::*;

const PRIVATE: &[u8] = include_bytes!("../../../tests/keys/rsa.pem");
const PUBLIC: &[u8] = include_bytes!("../../../tests/keys/rsa.pub.pem");
const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";
const NOW: u64 = 1_800_000_000;

fn encode(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn rsa_pair() -> RsaKeyPair {
    RsaKeyPair::from_pkcs8(PrivatePkcs8KeyDer::from_pem_slice(PRIVATE).unwrap().secret_pkcs8_der())
        .unwrap()
}

fn rsa_key() -> Key {
    Key::public(&SubjectPublicKeyInfoDer::from_pem_slice(PUBLIC).unwrap()).unwrap()
}

fn ec_pair(algorithm: &'static EcdsaSigningAlgorithm) -> EcdsaKeyPair {
    let random = SystemRandom::new();
    let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
    EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random).unwrap()
}

fn ec_jwk(pair: &EcdsaKeyPair, curve: &str, kid: &str) -> Value {
    let point = &pair.public_key().as_ref()[1..];
    let (x, y) = point.split_at(point.len() / 2);
    json!({ "kty": "EC", "crv": curve, "kid": kid, "x": encode(x), "y": encode(y) })
}

fn set(keys: &[Value]) -> Keys {
    Keys::read(json!({ "keys": keys }).to_string().as_bytes()).unwrap().0
}

/// `head.payload` of these, and then the signature of them.
fn signed(head: &str, payload: &str, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
    let message = format!("{}.{}", encode(head.as_bytes()), encode(payload.as_bytes()));
    let signature = encode(&sign(message.as_bytes()));
    format!("{message}.{signature}")
}

fn rsa_signed(head: &str, payload: &str, how: &'static dyn RsaEncoding) -> String {
    let pair = rsa_pair();
    signed(head, payload, |message| {
        let mut signature = vec![0; pair.public().modulus_len()];
        pair.sign(how, &SystemRandom::new(), message, &mut signature).unwrap();
        signature
    })
}

fn hmac_signed(head: &str, payload: &str, secret: &[u8]) -> String {
    signed(head, payload, |message| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message).as_ref().to_vec()
    })
}

fn claims() -> Value {
    json!({
        "iss": "https://issuer", "aud": ["other", "oncegate"], "sub": "alice", "exp": NOW + 60,
        "tenant_id": "acme", "org": { "id": 7, "a/b": "deep" }, "https://x/tenant.id": "named",
    })
}

/// The claims with some of them replaced; null removes one.
fn claims_with(changes: &Value) -> String {
    let mut all = claims();
    for (name, value) in changes.as_object().unwrap() {
        let members = all.as_object_mut().unwrap();
        if value.is_null() {
            members.remove(name)
        } else {
            members.insert(name.clone(), value.clone())
        };
    }
    all.to_string()
}

fn rules(algorithms: &[Algorithm]) -> Rules {
    Rules {
        algorithms: algorithms.to_vec(),
        issuer: "https://issuer".to_owned(),
        audiences: vec!["oncegate".to_owned()],
        leeway: Duration::from_secs(10),
    }
}

fn check_at(token: &str, keys: &Keys, rules: &Rules, now: u64) -> Result<Claims, TokenError> {
    verify(token, keys, rules, Duration::from_secs(now))
}

fn hs256(payload: &str) -> Result<Claims, TokenError> {
    let token = hmac_signed(r#"{"alg":"HS256","typ":"JWT"}"#, payload, SECRET);
    check_at(&token, &Keys::one(Key::secret(SECRET)), &rules(&[Algorithm::Hs256]), NOW)
}

#[test]
fn tokens_of_each_kind_of_key_are_accepted() {
    let payload = claims().to_string();
    let rsa = Keys::one(rsa_key());
    let token = rsa_signed(r#"{"alg":"RS256"}"#, &payload, &RSA_PKCS1_SHA256);
    assert!(check_at(&token, &rsa, &rules(&[Algorithm::Rs256]), NOW).is_ok());
    let token = rsa_signed(r#"{"alg":"PS512","typ":"at+jwt"}"#, &payload, &RSA_PSS_SHA512);
    assert!(check_at(&token, &rsa, &rules(&[Algorithm::Rs256, Algorithm::Ps512]), NOW).is_ok());
    for (curve, name, algorithm) in [
        (&ECDSA_P256_SHA256_FIXED_SIGNING, "P-256", Algorithm::Es256),
        (&ECDSA_P384_SHA384_FIXED_SIGNING, "P-384", Algorithm::Es384),
    ] {
        let pair = ec_pair(curve);
        let keys = set(&[ec_jwk(&pair, name, "one")]);
        let head = format!(r#"{{"alg":"{}","kid":"one"}}"#, algorithm.as_str());
        let token = signed(&head, &payload, |message| {
            pair.sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec()
        });
        assert!(check_at(&token, &keys, &rules(&[algorithm]), NOW).is_ok(), "{name}");
    }
    let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
    let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
    let keys = set(&[json!({
        "kty": "OKP", "crv": "Ed25519", "kid": "ed", "x": encode(pair.public_key().as_ref()),
    })]);
    let token =
        signed(r#"{"alg":"EdDSA","kid":"ed","typ":"application/JWT"}"#, &payload, |message| {
            pair.sign(message).as_ref().to_vec()
        });
    assert!(check_at(&token, &keys, &rules(&[Algorithm::EdDsa]), NOW).is_ok());
    assert!(hs256(&payload).is_ok());
}

#[test]
fn no_token_chooses_how_it_is_checked() {
    let payload = claims().to_string();
    let both = rules(&[Algorithm::Hs256, Algorithm::Rs256]);
    let rsa = Keys::one(rsa_key());
    let refused = |token: &str, keys: &Keys, rules: &Rules| {
        assert!(check_at(token, keys, rules, NOW).is_err(), "{token}");
    };
    // Signed by nobody, in every spelling.
    for none in ["none", "None", "NONE", "", "nOnE"] {
        let head = format!(r#"{{"alg":"{none}"}}"#);
        refused(&signed(&head, &payload, |_| Vec::new()), &rsa, &both);
    }
    refused(&signed("{}", &payload, |_| Vec::new()), &rsa, &both);
    refused(&signed(r#"{"alg":["RS256"]}"#, &payload, |_| Vec::new()), &rsa, &both);
    // The public key as the secret of an HMAC: as PEM, as DER, as its modulus; even where both algorithms are allowed.
    let der = SubjectPublicKeyInfoDer::from_pem_slice(PUBLIC).unwrap();
    let Material::Rsa { modulus, .. } = rsa_key().material else { panic!("an RSA key") };
    for secret in [PUBLIC, PUBLIC.trim_ascii_end(), der.as_ref(), &modulus] {
        refused(&hmac_signed(r#"{"alg":"HS256"}"#, &payload, secret), &rsa, &both);
    }
    // A good signature by an algorithm that is not named, or by another hash than the header says.
    let good = rsa_signed(r#"{"alg":"RS256"}"#, &payload, &RSA_PKCS1_SHA256);
    refused(&good, &rsa, &rules(&[Algorithm::Rs512, Algorithm::Ps256]));
    refused(&good, &Keys::one(Key::secret(SECRET)), &both);
    let lying = rsa_signed(r#"{"alg":"RS512"}"#, &payload, &RSA_PKCS1_SHA256);
    refused(&lying, &rsa, &rules(&[Algorithm::Rs512]));
    // A key that is for one algorithm only.
    let pair = ec_pair(&ECDSA_P256_SHA256_FIXED_SIGNING);
    let mut jwk = ec_jwk(&pair, "P-256", "one");
    jwk["alg"] = json!("ES256");
    assert!(!set(&[jwk]).fit(&[Algorithm::Es384, Algorithm::Rs256]));
    // An extension that changes what is signed.
    let head = r#"{"alg":"HS256","crit":["b64"],"b64":false}"#;
    refused(&hmac_signed(head, &payload, SECRET), &Keys::one(Key::secret(SECRET)), &both);
    // Another kind of JWT, and a header that says two things.
    for head in [
        r#"{"alg":"HS256","typ":"dpop+jwt"}"#,
        r#"{"alg":"HS256","typ":7}"#,
        r#"{"alg":"none","alg":"HS256"}"#,
    ] {
        refused(&hmac_signed(head, &payload, SECRET), &Keys::one(Key::secret(SECRET)), &both);
    }
}

#[test]
fn a_forged_or_malformed_token_is_refused() {
    let keys = Keys::one(Key::secret(SECRET));
    let rules = rules(&[Algorithm::Hs256]);
    let good = hmac_signed(r#"{"alg":"HS256"}"#, &claims().to_string(), SECRET);
    assert!(check_at(&good, &keys, &rules, NOW).is_ok());
    let parts: Vec<&str> = good.split('.').collect();
    let other = encode(claims_with(&json!({ "tenant_id": "globex" })).as_bytes());
    for bad in [
        String::new(),
        ".".to_owned(),
        "..".to_owned(),
        "a.b".to_owned(),
        format!("{}.{other}.{}", parts[0], parts[2]),
        format!("{}.{}.", parts[0], parts[1]),
        format!("{}.{}", parts[0], parts[1]),
        format!("{good}."),
        format!("{good}.{good}"),
        format!("{good}="),
        format!("{good}A"),
        format!("{}.{}", good, parts[2]),
        good.replace('.', ".."),
        hmac_signed(
            r#"{"alg":"HS256"}"#,
            &claims().to_string(),
            b"another secret of thirty-two byte",
        ),
        hmac_signed(r#"{"alg":"HS256"}"#, "[]", SECRET),
        hmac_signed(r#"{"alg":"HS256"}"#, "{", SECRET),
        hmac_signed("\"alg\"", &claims().to_string(), SECRET),
        hmac_signed(
            r#"{"alg":"HS256"}"#,
            &format!("{}1{}", "[".repeat(5000), "]".repeat(5000)),
            SECRET,
        ),
        format!("{good}{}", "A".repeat(TOKEN_MAX)),
    ] {
        assert!(check_at(&bad, &keys, &rules, NOW).is_err(), "{bad:.200}");
    }
    // The last digit of a signature has bits that mean nothing: they must be zero.
    let (rest, last) = good.split_at(good.len() - 1);
    for digit in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_".chars() {
        let accepted = check_at(&format!("{rest}{digit}"), &keys, &rules, NOW).is_ok();
        assert_eq!(accepted, last.starts_with(digit), "{digit}");
    }
}

#[test]
fn claims_of_another_time_issuer_or_audience_are_refused() {
    for (changes, why) in [
        (json!({ "exp": null }), "does not say when it expires"),
        (json!({ "exp": NOW - 10 }), "has expired"),
        (json!({ "exp": NOW }), ""),
        (json!({ "exp": "never" }), "has a time that is no number"),
        (json!({ "exp": (NOW + 60).to_string() }), "has a time that is no number"),
        (json!({ "exp": [NOW + 60] }), "has a time that is no number"),
        (json!({ "exp": 1_800_000_000.5 }), ""),
        (json!({ "exp": -1 }), "has expired"),
        (json!({ "nbf": NOW + 11 }), "is not valid yet"),
        (json!({ "nbf": NOW + 9 }), ""),
        (json!({ "nbf": "99999999999" }), "has a time that is no number"),
        (json!({ "iss": null }), "is of another issuer"),
        (json!({ "iss": "https://issuer/" }), "is of another issuer"),
        (json!({ "iss": ["https://issuer"] }), "is of another issuer"),
        (json!({ "aud": null }), "is meant for another audience"),
        (json!({ "aud": "other" }), "is meant for another audience"),
        (json!({ "aud": "oncegate" }), ""),
        (json!({ "aud": [] }), "is meant for another audience"),
        (json!({ "aud": [["oncegate"]] }), "is meant for another audience"),
        (json!({ "aud": { "oncegate": true } }), "is meant for another audience"),
        (json!({ "aud": "oncegate other" }), "is meant for another audience"),
        (json!({ "sub": 7 }), "has a subject that is no text"),
    ] {
        let expected = if why.is_empty() { Ok(()) } else { Err(TokenError::Invalid(why)) };
        assert_eq!(hs256(&claims_with(&changes)).map(drop), expected, "{changes}");
    }
    // A name that stands twice says two things.
    let twice = claims().to_string().replacen('{', r#"{"tenant_id":"globex","#, 1);
    assert!(hs256(&twice).is_err());
}

#[test]
fn a_claim_is_a_text_or_a_whole_number_at_its_place() {
    let token = hs256(&claims().to_string()).unwrap();
    let read = |path: &str| token.text(&ClaimPath::parse(path).unwrap());
    for (path, text) in [
        ("tenant_id", "acme"),
        ("https://x/tenant.id", "named"),
        ("/org/id", "7"),
        ("/org/a~1b", "deep"),
        ("/tenant_id", "acme"),
    ] {
        assert_eq!(read(path), Ok(text.to_owned()), "{path}");
    }
    for path in ["org", "org.id", "/org/none", "/tenant_id/0", "aud", "/aud/0", "tenant"] {
        assert!(read(path).is_err(), "{path}");
    }
    for odd in [json!(1.5), json!(1e300), json!(true), json!({}), json!([])] {
        let token = hs256(&claims_with(&json!({ "tenant_id": odd }))).unwrap();
        assert!(token.text(&ClaimPath::parse("tenant_id").unwrap()).is_err(), "{odd}");
    }
    assert_eq!(token.subject(), Some("alice"));
    for odd in ["", " ", "a\nb", &"x".repeat(256)] {
        assert_eq!(hs256(&claims_with(&json!({ "sub": odd }))).unwrap().subject(), None, "{odd:?}");
    }
    for bad in ["", "/", "//", "/a/"] {
        assert_eq!(ClaimPath::parse(bad), None, "{bad:?}");
    }
}

#[test]
fn a_key_is_found_by_its_name_alone() {
    let (one, two) =
        (ec_pair(&ECDSA_P256_SHA256_FIXED_SIGNING), ec_pair(&ECDSA_P256_SHA256_FIXED_SIGNING));
    let keys = set(&[ec_jwk(&one, "P-256", "one"), ec_jwk(&two, "P-256", "two")]);
    let rules = rules(&[Algorithm::Es256]);
    let token = |kid: &str| {
        signed(&format!(r#"{{"alg":"ES256"{kid}}}"#), &claims().to_string(), |message| {
            one.sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec()
        })
    };
    let check = |kid: &str| check_at(&token(kid), &keys, &rules, NOW).map(drop);
    assert_eq!(check(r#","kid":"one""#), Ok(()));
    assert_eq!(
        check(r#","kid":"two""#),
        Err(TokenError::Invalid("has a signature that does not fit"))
    );
    for unknown in
        ["", "One", "one ", "../../../../dev/null", "/etc/passwd", "one\\u0000", "' OR 1=1"]
    {
        assert_eq!(
            check(&format!(r#","kid":"{unknown}""#)),
            Err(TokenError::KeyUnknown),
            "{unknown}"
        );
    }
    for odd in ["", r#","kid":1"#, r#","kid":["one"]"#, r#","kid":null"#] {
        assert!(matches!(check(odd), Err(TokenError::Invalid(_))), "{odd}");
    }
    // Keys that the token itself brings, or names a place of, are nobody's.
    let own = ec_jwk(&one, "P-256", "mine");
    let head = format!(r#","kid":"mine","jwk":{own},"jku":"https://evil","x5u":"https://evil""#);
    assert_eq!(check(&head), Err(TokenError::KeyUnknown));
    // With one key there is nothing to choose.
    let alone = set(&[ec_jwk(&one, "P-256", "one")]);
    assert!(check_at(&token(""), &alone, &rules, NOW).is_ok());
}

#[test]
fn of_a_set_only_public_keys_for_signatures_are_taken() {
    let pair = ec_pair(&ECDSA_P256_SHA256_FIXED_SIGNING);
    let good = ec_jwk(&pair, "P-256", "good");
    let with = |name: &str, value: Value| {
        let mut key = good.clone();
        key[name] = value;
        key
    };
    let bad = [
        json!({ "kty": "oct", "kid": "s", "k": encode(SECRET) }),
        json!({ "kty": "RSA", "n": encode(&[0xff; 128]), "e": "AQAB" }),
        json!({ "kty": "RSA", "n": encode(&[0; 300]), "e": "AQAB" }),
        json!({ "kty": "EC", "crv": "P-521", "x": "AA", "y": "AA" }),
        json!({ "kty": 1 }),
        json!("key"),
        json!(null),
        with("use", json!("enc")),
        with("key_ops", json!(["sign"])),
        with("alg", json!("RS256")),
        with("alg", json!("none")),
        with("kid", json!(7)),
        with("x", json!("AA")),
        with("x", json!("=")),
    ];
    for key in &bad {
        let alone = json!({ "keys": [key] }).to_string();
        let (keys, left_out) = Keys::read(alone.as_bytes()).unwrap();
        assert_eq!((keys.count(), left_out.len()), (0, 1), "{key}");
    }
    let mut all = bad.to_vec();
    all.push(good.clone());
    let (keys, left_out) = Keys::read(json!({ "keys": all }).to_string().as_bytes()).unwrap();
    assert_eq!((keys.count(), left_out.len()), (1, bad.len()), "{left_out:?}");
    for text in ["", "[]", "{}", r#"{"keys":{}}"#, r#"{"keys":null}"#, "<html>"] {
        assert!(Keys::read(text.as_bytes()).is_err(), "{text}");
    }
    let (keys, left_out) = Keys::read(br#"{"keys":[]}"#).unwrap();
    assert_eq!((keys.count(), left_out.len()), (0, 0));
    let (keys, _) = Keys::read(json!({ "keys": vec![good; 500] }).to_string().as_bytes()).unwrap();
    assert_eq!(keys.count(), KEYS_MAX);
}

#[test]
fn public_keys_are_read_of_every_kind_and_in_whole_only() {
    let der = SubjectPublicKeyInfoDer::from_pem_slice(PUBLIC).unwrap();
    assert!(Key::public(&der).unwrap().fits(Algorithm::Rs256));
    let prefix = |text: &str| -> Vec<u8> {
        let digits: Vec<u8> =
            text.chars().map(|digit| u8::try_from(digit.to_digit(16).unwrap()).unwrap()).collect();
        digits.chunks(2).map(|pair| pair[0] * 16 + pair[1]).collect()
    };
    for (head, length, algorithm) in [
        ("3059301306072a8648ce3d020106082a8648ce3d030107034200", 65, Algorithm::Es256),
        ("3076301006072a8648ce3d020106052b81040022036200", 97, Algorithm::Es384),
        ("302a300506032b6570032100", 32, Algorithm::EdDsa),
    ] {
        let mut key = prefix(head);
        key.extend(vec![4; length]);
        assert!(Key::public(&key).is_some_and(|key| key.fits(algorithm)), "{}", algorithm.as_str());
    }
    for end in 0..der.len() {
        assert_eq!(Key::public(&der[..end]), None, "{end}");
    }
    let mut longer = der.to_vec();
    longer.push(0);
    assert_eq!(Key::public(&longer), None);
    assert_eq!(format!("{:?}", Key::secret(b"hidden")), "Key { id: None, .. }");
}
