//! Who makes tokens: keys of its own, a set of them that is fetched, and tokens as good or as bad as a test wants them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair,
};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};

use super::upstream::{Reply, Upstream};

pub(crate) const ISSUER: &str = "https://issuer.example/";
pub(crate) const AUDIENCE: &str = "orders";

/// The public half of the key that signs [`rs256`].
pub(crate) fn public_key_file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/keys/rsa.pub.pem")
}

pub(crate) fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Seconds since 1970, this many from now.
#[expect(clippy::disallowed_methods, reason = "a token tells the time of day")]
pub(crate) fn in_seconds(seconds: i64) -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    i64::try_from(now.as_secs()).expect("a time") + seconds
}

/// The claims of a good token, with these in it; null leaves one out.
pub(crate) fn claims(tenant: &str, changes: &Value) -> String {
    let mut all = json!({
        "iss": ISSUER, "aud": AUDIENCE, "exp": in_seconds(300), "sub": "alice", "tenant_id": tenant,
    });
    let members = all.as_object_mut().expect("claims");
    for (name, value) in changes.as_object().expect("changes") {
        if value.is_null() {
            members.remove(name);
        } else {
            members.insert(name.clone(), value.clone());
        }
    }
    all.to_string()
}

/// Head and payload in their form, and what `sign` makes of them.
pub(crate) fn signed(head: &str, payload: &str, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
    let message = format!("{}.{}", encode(head), encode(payload));
    let signature = encode(sign(message.as_bytes()));
    format!("{message}.{signature}")
}

fn rsa_sign(message: &[u8]) -> Vec<u8> {
    let pem = include_bytes!("../../keys/rsa.pem");
    let key = PrivatePkcs8KeyDer::from_pem_slice(pem).expect("a key");
    let pair = RsaKeyPair::from_pkcs8(key.secret_pkcs8_der()).expect("a key");
    let mut signature = vec![0; pair.public().modulus_len()];
    pair.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature)
        .expect("a signature");
    signature
}

pub(crate) fn rs256_with(head: &str, payload: &str) -> String {
    signed(head, payload, rsa_sign)
}

pub(crate) fn rs256(payload: &str) -> String {
    rs256_with(r#"{"alg":"RS256","typ":"JWT"}"#, payload)
}

pub(crate) fn hs256(payload: &str, secret: &[u8]) -> String {
    signed(r#"{"alg":"HS256","typ":"JWT"}"#, payload, |message| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message).as_ref().to_vec()
    })
}

/// A key with a name.
pub(crate) struct Named {
    name: String,
    pair: EcdsaKeyPair,
}

impl Named {
    pub(crate) fn new(name: &str) -> Self {
        let random = SystemRandom::new();
        let how = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let document = EcdsaKeyPair::generate_pkcs8(how, &random).expect("a key");
        let pair = EcdsaKeyPair::from_pkcs8(how, document.as_ref(), &random).expect("a key");
        Self { name: name.to_owned(), pair }
    }

    pub(crate) fn token(&self, payload: &str) -> String {
        let head = json!({ "alg": "ES256", "kid": self.name }).to_string();
        signed(&head, payload, |message| {
            self.pair.sign(&SystemRandom::new(), message).expect("a signature").as_ref().to_vec()
        })
    }

    fn jwk(&self) -> Value {
        let point = &self.pair.public_key().as_ref()[1..];
        let (x, y) = point.split_at(32);
        json!({ "kty": "EC", "crv": "P-256", "kid": self.name, "x": encode(x), "y": encode(y) })
    }
}

/// A server with a set of keys.
pub(crate) struct KeyServer {
    server: Upstream,
    answer: Arc<Mutex<Reply>>,
}

impl KeyServer {
    /// One that answers nothing so far.
    pub(crate) async fn start() -> Self {
        let answer = Arc::new(Mutex::new(Reply::fin("")));
        let said = Arc::clone(&answer);
        let server = Upstream::start(move |_, _| said.lock().expect("the answer").clone());
        Self { server: server.await, answer }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/keys?v=1", self.server.addr)
    }

    /// From now on answers these keys.
    pub(crate) fn publish(&self, keys: &[&Named]) {
        let keys: Vec<Value> = keys.iter().map(|key| key.jwk()).collect();
        self.answer_json(&json!({ "keys": keys }).to_string());
    }

    /// As [`KeyServer::publish`], each time after a while.
    pub(crate) fn publish_slowly(&self, keys: &[&Named], delay: Duration) {
        self.publish(keys);
        let mut answer = self.answer.lock().expect("the answer");
        *answer = answer.clone().after(delay);
    }

    pub(crate) fn answer_json(&self, body: &str) {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        self.answer(Reply::fin(format!("{head}{body}")));
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.server.addr
    }

    /// From now on answers this.
    pub(crate) fn answer(&self, reply: Reply) {
        *self.answer.lock().expect("the answer") = reply;
    }

    /// How often it was asked.
    pub(crate) fn asked(&self) -> usize {
        self.server.seen().len()
    }

    pub(crate) async fn wait_for(&self, count: usize) {
        self.server.wait_for_requests(count).await;
    }

    pub(crate) fn last_head(&self) -> String {
        self.server.seen().pop().expect("a request").head
    }
}
