//! What no route names passes through as if the gateway were not there, streamed both ways.
//!
//! The request's target, the spelling of its header names and the kind of its body stay as they came; what is meant for one
//! hop is removed, and the headers that name the caller are added. The answer goes back the same way.
//!
//! What must stay true: a body that breaks off on one side breaks off on the other, so that nobody takes a part for the
//! whole; nothing is buffered beyond what hyper holds of one connection; when the caller goes away, so does the request to
//! the upstream, because all of it lives in the future that the server drops.
//!
//! A request that asks for another protocol may become a [`tunnel`](crate::gateway::tunnel).
//!
//! Nothing is remembered here. When the process dies, both sides see their connections end.

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Request, Response};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, Empty};

use crate::gateway::accept::Peer;
use crate::gateway::headers::{self, Forwarding, Hop, HostPolicy, Offer};
use crate::gateway::tunnel::{Switch, Tunnel, Tunnels};
pub use crate::gateway::upstream::PassError;
use crate::gateway::upstream::{Body, Switched, Upstream};

/// Streams a request to the upstream, and its answer back.
///
/// The request has passed [`headers::check_framing`] and is in origin-form. Dropping the future, or the answer's body, cuts
/// the request to the upstream.
pub async fn pass(
    upstream: &Upstream,
    forwarding: &Forwarding,
    tunnels: &Tunnels,
    request: Request<Body>,
) -> Result<Response<Body>, PassError> {
    let mut request = request.map(without_hop_trailers);
    let switch = request.extensions_mut().remove::<Switch>();
    let offer = Offer::of(&request).filter(|_| request.body().is_end_stream());
    prepare(upstream, forwarding, &mut request);
    if let (Some(switch), Some(offer)) = (switch, offer) {
        return open(upstream, tunnels, request, &switch, &offer).await;
    }
    // The chunks of a GET or DELETE are a body as well: hyper would send it without, by default.
    let of_unknown_length = !request.body().is_end_stream()
        && request.body().size_hint().exact().is_none()
        && !request.headers().contains_key(header::CONTENT_LENGTH);
    if of_unknown_length {
        let chunked = HeaderValue::from_static("chunked");
        request.headers_mut().insert(header::TRANSFER_ENCODING, chunked);
    }
    let mut answer = upstream.pooled(request).await?.map(without_hop_trailers);
    clean_answer(answer.headers_mut());
    Ok(answer)
}

/// Asks the upstream to switch protocols. If it does, the tunnel is left for the caller's connection.
async fn open(
    upstream: &Upstream,
    tunnels: &Tunnels,
    mut request: Request<Body>,
    switch: &Switch,
    offer: &Offer,
) -> Result<Response<Body>, PassError> {
    let permit = tunnels.permit().ok_or(PassError::Crowded)?;
    let caller = hyper::upgrade::on(&mut request);
    let target = request.uri().clone();
    offer.write(request.headers_mut());
    match upstream.switched(request, offer).await? {
        Switched::Not(answer) => {
            let mut answer = answer.map(without_hop_trailers);
            clean_answer(answer.headers_mut());
            Ok(answer)
        }
        Switched::To { taken, head, connection } => {
            let idle_timeout = upstream.tunnel_idle_timeout();
            let protocol = taken.to_string();
            let tunnel =
                Tunnel { caller, upstream: connection, idle_timeout, permit, protocol, target };
            switch.leave(tunnel);
            let nothing = Empty::new().map_err(|never| match never {}).boxed_unsync();
            let mut answer = Response::from_parts(head, nothing);
            clean_answer(answer.headers_mut());
            answer.headers_mut().remove(header::CONTENT_LENGTH);
            taken.write(answer.headers_mut());
            Ok(answer)
        }
    }
}

/// Makes a request's head fit to go to the upstream: hop-by-hop headers and names of ours out, forwarding headers in.
pub fn prepare<B>(upstream: &Upstream, forwarding: &Forwarding, request: &mut Request<B>) {
    let peer = request.extensions().get::<Peer>().copied();
    let headers = request.headers_mut();
    let hop = Hop {
        peer: peer.and_then(|peer| peer.addr).map(|addr| addr.ip()),
        host: headers.get(header::HOST).cloned(),
        https: peer.is_some_and(|peer| peer.https),
    };
    headers::strip_hop_by_hop(headers);
    headers::drop_own(headers);
    headers.remove(header::EXPECT);
    headers::forward(forwarding, &hop, headers);
    if forwarding.host == HostPolicy::Upstream {
        headers.insert(header::HOST, upstream.authority().clone());
    }
}

/// Makes an answer's head fit to go to the caller.
pub fn clean_answer(headers: &mut HeaderMap) {
    headers::strip_hop_by_hop(headers);
    headers::drop_own(headers);
    headers::add_via(headers);
}

/// Trailers may not carry what frames, routes or belongs to one hop; hyper filters them on the way out only.
pub(super) fn without_hop_trailers(body: Body) -> Body {
    if body.is_end_stream() {
        return body;
    }
    let clean = |frame: Frame<Bytes>| match frame.into_trailers() {
        Ok(mut trailers) => {
            headers::clean_trailers(&mut trailers);
            Frame::trailers(trailers)
        }
        Err(frame) => frame,
    };
    body.map_frame(clean).boxed_unsync()
}
