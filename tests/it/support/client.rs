//! A caller: one connection for each request, nothing sent twice.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::orders::EXECUTED_FOR;

/// An answer, read to its end.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().expect("a header of text"))
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {:?}", self.body))
    }

    /// The last part of a problem's type.
    pub fn problem(&self) -> String {
        let kind = self.json()["type"].as_str().unwrap_or_default().to_owned();
        kind.strip_prefix("urn:oncegate:problem:").unwrap_or_default().to_owned()
    }

    pub fn replayed(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    pub fn record(&self) -> String {
        self.header("oncegate-record").expect("an answer that names its record").to_owned()
    }
}

/// A request being put together.
#[derive(Clone, Debug)]
pub struct Ask {
    method: Method,
    target: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Bytes,
}

pub fn get(target: &str) -> Ask {
    Ask { method: Method::GET, target: target.into(), headers: Vec::new(), body: Bytes::new() }
}

/// A POST of JSON.
pub fn post(target: &str, body: &str) -> Ask {
    let body = Bytes::copy_from_slice(body.as_bytes());
    let ask = Ask { method: Method::POST, target: target.into(), headers: Vec::new(), body };
    ask.header("content-type", "application/json")
}

impl Ask {
    pub fn method(mut self, method: Method) -> Self {
        self.method = method;
        self
    }

    pub fn target(mut self, target: &str) -> Self {
        self.target = target.into();
        self
    }

    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.into(), value.as_ref().to_vec()));
        self
    }

    /// Replaces a header.
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self.header(name, value)
    }

    pub fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    pub fn tenant(self, tenant: &str) -> Self {
        self.header("x-tenant-id", tenant)
    }

    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// Sends it and reads the whole answer.
    pub async fn send(
        &self,
        to: SocketAddr,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        let stream = TcpStream::connect(to).await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(connection);
        let mut request = Request::builder()
            .method(self.method.clone())
            .uri(&self.target)
            .header("host", to.to_string());
        for (name, value) in &self.headers {
            request = request.header(name, value.as_slice());
        }
        let response = sender.send_request(request.body(Full::new(self.body.clone()))?).await?;
        let (head, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        drop(sender);
        driver.abort();
        let answer = Answer { status: head.status, headers: head.headers, body };
        self.is_answered_for_its_own_key(&answer);
        Ok(answer)
    }

    /// No test passes with the answer to another key, whether it looks at the answer or not.
    fn is_answered_for_its_own_key(&self, answer: &Answer) {
        let mut keys =
            self.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("idempotency-key"));
        let (Some((_, key)), None) = (keys.next(), keys.next()) else { return };
        let Some(executed_for) = answer.headers.get(EXECUTED_FOR) else { return };
        // A key in quotes is the one within them, where a backslash takes the next letter as it is.
        let bare = |key: &[u8]| {
            let key = String::from_utf8_lossy(key).trim().to_owned();
            let within = key.strip_prefix('"').and_then(|key| key.strip_suffix('"'));
            within.map(|key| key.replace("\\\"", "\"").replace("\\\\", "\\")).unwrap_or(key)
        };
        let (asked, executed_for) = (bare(key), bare(executed_for.as_bytes()));
        assert_eq!(asked, executed_for, "{answer:?}");
    }

    /// Sends it where an answer must come.
    pub async fn to(&self, to: SocketAddr) -> Answer {
        self.send(to).await.unwrap_or_else(|error| panic!("no answer to {self:?}: {error}"))
    }
}
