//! (signatures)
use http::{Request, Response};

use crate::gateway::headers::Forwarding;
pub use crate::gateway::upstream::PassError;
use crate::gateway::upstream::{Body, Upstream};

/// Streams a request that no route names to the upstream and its answer back.
pub async fn pass(
    _upstream: &Upstream,
    _forwarding: &Forwarding,
    _request: Request<Body>,
) -> Result<Response<Body>, PassError> {
    unimplemented!()
}
