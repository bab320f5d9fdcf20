//! Makes body and headers of the stored message in each format. Pure: every attempt sends the same bytes.
//!
//! - `standard-webhooks`: the stored bytes themselves.
//! - `cloudevents`, the binary mode: the unchanged `data` of the message, and all other members in `ce-*` headers.
//! - `cloudevents-structured`: one JSON object with all members, `data` unchanged.
//!
//! Invariant: no message makes a header that cannot be sent. Values of attributes are percent-encoded as
//! the HTTP binding of CloudEvents says (3.1.3.2), so a tenant or a type may be any text.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::relay::sink::broker::header;

/// The format of body and headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The message as it is stored.
    #[default]
    StandardWebhooks,
    /// CloudEvents 1.0 in binary mode.
    CloudEvents,
    /// CloudEvents 1.0 in structured mode.
    CloudEventsStructured,
}

/// Body and headers of a message, without the headers that each attempt makes anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) content_type: HeaderValue,
    pub(super) attributes: Vec<(HeaderName, HeaderValue)>,
    pub(super) body: Bytes,
}

/// The members of a stored message.
#[derive(Deserialize)]
struct Message<'m> {
    #[serde(rename = "type")]
    kind: String,
    timestamp: String,
    #[serde(borrow)]
    data: &'m RawValue,
    tenant: String,
    operation: String,
    idempotency_key: String,
    id: String,
}

/// A CloudEvent in its JSON format. The order of the fields is the order of the members.
#[derive(Serialize)]
struct Structured<'m> {
    specversion: &'m str,
    id: &'m str,
    source: &'m str,
    #[serde(rename = "type")]
    kind: &'m str,
    time: &'m str,
    datacontenttype: &'m str,
    tenant: &'m str,
    operation: &'m str,
    idempotencykey: &'m str,
    data: &'m RawValue,
}

const VERSION: &str = "1.0";
const JSON: &str = "application/json";

/// Body and headers for `payload`.
///
/// # Errors
/// The payload is not a message. No further attempt will change that.
pub(super) fn outgoing(format: Format, source: &str, payload: &Bytes) -> Result<Outgoing, String> {
    if format == Format::StandardWebhooks {
        let content_type = HeaderValue::from_static(JSON);
        return Ok(Outgoing { content_type, attributes: Vec::new(), body: payload.clone() });
    }
    let message: Message<'_> = serde_json::from_slice(payload)
        .map_err(|error| format!("the stored message cannot be made a CloudEvent: {error}"))?;
    if format == Format::CloudEvents {
        return binary(source, &message, payload);
    }
    let structured = Structured {
        specversion: VERSION,
        id: &message.id,
        source,
        kind: &message.kind,
        time: &message.timestamp,
        datacontenttype: JSON,
        tenant: &message.tenant,
        operation: &message.operation,
        idempotencykey: &message.idempotency_key,
        data: message.data,
    };
    let body = serde_json::to_vec(&structured).map_err(|error| error.to_string())?;
    let content_type = HeaderValue::from_static("application/cloudevents+json");
    Ok(Outgoing { content_type, attributes: Vec::new(), body: body.into() })
}

fn binary(source: &str, message: &Message<'_>, payload: &Bytes) -> Result<Outgoing, String> {
    let attributes = [
        ("ce-specversion", VERSION),
        ("ce-id", &message.id),
        ("ce-source", source),
        ("ce-type", &message.kind),
        ("ce-time", &message.timestamp),
        ("ce-tenant", &message.tenant),
        ("ce-operation", &message.operation),
        ("ce-idempotencykey", &message.idempotency_key),
    ];
    let attribute = |(name, value): (&'static str, &str)| {
        let encoded = header(value);
        let value = HeaderValue::from_str(&encoded).map_err(|error| error.to_string())?;
        Ok((HeaderName::from_static(name), value))
    };
    Ok(Outgoing {
        content_type: HeaderValue::from_static(JSON),
        attributes: attributes.into_iter().map(attribute).collect::<Result<_, String>>()?,
        // A slice of the stored message, without a copy.
        body: payload.slice_ref(message.data.get().as_bytes()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &str = r#"{"b": 1.10, "a":12345678901234567890,"u":"é\/<","a":2}"#;

    fn message() -> Bytes {
        let kind = r#""order \"é\" 100%🎉""#;
        let text = format!(
            r#"{{"type":{kind},"timestamp":"1970-01-01T00:00:01.500000Z","data":{DATA},"tenant":"acme é","operation":"orders.create","idempotency_key":"k\u0001~!","id":"8e0f"}}"#
        );
        Bytes::from(text)
    }

    #[test]
    fn in_binary_mode_the_data_is_the_body_and_any_text_makes_a_header() {
        let sent = outgoing(Format::CloudEvents, "/shop?x=é", &message()).unwrap();
        assert_eq!(
            (&sent.body[..], &sent.content_type),
            (DATA.as_bytes(), &HeaderValue::from_static(JSON))
        );
        let shown = |(name, value): &(HeaderName, HeaderValue)| {
            format!("{name}: {}", value.to_str().unwrap())
        };
        let expected = [
            "ce-specversion: 1.0",
            "ce-id: 8e0f",
            "ce-source: /shop?x=%C3%A9",
            "ce-type: order%20%22%C3%A9%22%20100%25%F0%9F%8E%89",
            "ce-time: 1970-01-01T00:00:01.500000Z",
            "ce-tenant: acme%20%C3%A9",
            "ce-operation: orders.create",
            "ce-idempotencykey: k%01~!",
        ];
        assert_eq!(sent.attributes.iter().map(shown).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn in_structured_mode_the_data_stands_in_it_byte_for_byte_and_twice_is_the_same() {
        let sent = outgoing(Format::CloudEventsStructured, "/s", &message()).unwrap();
        let expected = format!(
            r#"{{"specversion":"1.0","id":"8e0f","source":"/s","type":"order \"é\" 100%🎉","time":"1970-01-01T00:00:01.500000Z","datacontenttype":"application/json","tenant":"acme é","operation":"orders.create","idempotencykey":"k\u0001~!","data":{DATA}}}"#
        );
        assert_eq!(std::str::from_utf8(&sent.body).unwrap(), expected);
        assert_eq!(sent.content_type, "application/cloudevents+json");
        let again = outgoing(Format::CloudEventsStructured, "/s", &message()).unwrap();
        assert_eq!(sent, again);
    }

    #[test]
    fn what_is_no_message_is_an_error_where_it_must_be_read_and_goes_out_as_it_is_elsewhere() {
        for format in [Format::CloudEvents, Format::CloudEventsStructured] {
            let error = outgoing(format, "/s", &Bytes::from_static(b"{}")).unwrap_err();
            assert!(error.contains("stored message"), "{error}");
        }
        let plain = Bytes::from_static(b"{}");
        assert_eq!(outgoing(Format::StandardWebhooks, "/s", &plain).unwrap().body, plain);
    }
}
