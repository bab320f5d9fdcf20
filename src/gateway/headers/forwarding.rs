//! How the upstream learns who asked: `X-Forwarded-*` and `Forwarded`, which say the same.
//!
//! An upstream reads one of the two families, and it is not known which. So what a trusted proxy says in one of them stands in
//! the other as well: the addresses that the request came over, and the scheme and host that the caller used. Where it
//! says nothing of scheme or host, what reached this gateway counts. Our own hop is one address at the end of both lists.
//!
//! What must stay true: nothing that an untrusted peer says goes on; both families name the same addresses, scheme and host,
//! whether the first or the last of several elements is read. Most proxies write `X-Forwarded-*` and pass the caller's own
//! `Forwarded` on unread: so where any of the former is there, `Forwarded` is not believed, and made anew unless it agrees.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use http::header::{self, Entry};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::{add_via, drop_twins, is_host};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

const SCHEME: HeaderName = HeaderName::from_static("x-forwarded-scheme");
const PROTOCOL: HeaderName = HeaderName::from_static("x-forwarded-protocol");
const URL_SCHEME: HeaderName = HeaderName::from_static("x-url-scheme");
const X_SCHEME: HeaderName = HeaderName::from_static("x-scheme");
const SSL: HeaderName = HeaderName::from_static("x-forwarded-ssl");
const FRONT_END: HeaderName = HeaderName::from_static("front-end-https");

/// Other names under which proxies say the scheme, and frameworks read it. The last two hold `on` or `off`.
const SCHEMES: [HeaderName; 6] = [SCHEME, PROTOCOL, URL_SCHEME, X_SCHEME, SSL, FRONT_END];

/// All but `Forwarded`.
const LEGACY: [HeaderName; 11] = [
    FORWARDED_FOR,
    FORWARDED_HOST,
    FORWARDED_PORT,
    FORWARDED_PROTO,
    REAL_IP,
    SCHEME,
    PROTOCOL,
    URL_SCHEME,
    X_SCHEME,
    SSL,
    FRONT_END,
];

/// What a proxy says of itself, and frameworks build links of. It says nothing of the caller, so it goes on as a trusted
/// peer wrote it.
const OF_THE_PROXY: [HeaderName; 3] = [
    HeaderName::from_static("x-forwarded-prefix"),
    HeaderName::from_static("x-forwarded-server"),
    HeaderName::from_static("x-forwarded-by"),
];

/// The forwarding headers: ours to say, whatever an untrusted caller claims.
pub(super) fn is_forwarding(name: &HeaderName) -> bool {
    name == header::FORWARDED || LEGACY.contains(name) || OF_THE_PROXY.contains(name)
}

/// Addresses whose word about the caller counts: `10.0.0.0/8`, `::1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u32,
}

impl Network {
    /// Whether an address belongs to it. A mapped IPv4 address counts as IPv4.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                let differing = ours.to_bits() ^ theirs.to_bits();
                differing.checked_shr(32 - self.prefix).unwrap_or(0) == 0
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => {
                let differing = ours.to_bits() ^ theirs.to_bits();
                differing.checked_shr(128 - self.prefix).unwrap_or(0) == 0
            }
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => false,
        }
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let wrong = || format!("{text:?} is not an address or a network such as 10.0.0.0/8");
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let widest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(digits) => digits.parse().map_err(|_| wrong())?,
            None => widest,
        };
        if prefix > widest {
            return Err(wrong());
        }
        Ok(Self { address, prefix })
    }
}

/// What the upstream gets as Host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostPolicy {
    /// What the caller sent.
    #[default]
    Keep,
    /// The upstream's own authority.
    Upstream,
}

/// How the upstream learns who asked.
#[derive(Clone, Debug, Default)]
pub struct Forwarding {
    /// Proxies in front of us: what they say of the caller is kept and extended. A unix socket is trusted always.
    pub trusted: Vec<Network>,
    /// What the upstream gets as Host.
    pub host: HostPolicy,
}

/// The hop that a request came over.
#[derive(Clone, Debug)]
pub struct Hop {
    /// The other end of the connection; none on a unix socket.
    pub peer: Option<IpAddr>,
    /// Host as the caller sent it.
    pub host: Option<HeaderValue>,
    /// Whether the caller spoke TLS to us.
    pub https: bool,
}

/// What is said of the way of a request before it came here.
#[derive(Debug, Default, PartialEq, Eq)]
struct Forwarded {
    /// Whom it came over, the caller first.
    nodes: Vec<Node>,
    /// How the caller spoke.
    proto: Option<String>,
    /// Whom the caller asked.
    host: Option<String>,
}

/// One stop on the way (RFC 7239, 6).
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Address(IpAddr, Option<u16>),
    /// `unknown`, or a name that means nothing to others.
    Hidden(String),
}

/// Writes `X-Forwarded-For`, `-Proto` and `-Host`, `Forwarded` and `Via` on a request.
///
/// From a trusted peer both families go on, extended by our hop; what is missing in one of them is made from the other. A
/// header that does not parse is dropped whole. From anybody else all of it is replaced.
pub fn forward(forwarding: &Forwarding, hop: &Hop, headers: &mut HeaderMap) {
    let trusted = match hop.peer {
        Some(peer) => forwarding.trusted.iter().any(|network| network.contains(peer)),
        None => true,
    };
    let (legacy, own, forwarded) = (LEGACY, OF_THE_PROXY, header::FORWARDED);
    let names: Vec<_> = legacy.iter().chain(&own).chain([&forwarded]).collect();
    drop_twins(headers, &names);
    let believed = if trusted {
        believed(headers)
    } else {
        for name in names {
            headers.remove(name);
        }
        Forwarded::default()
    };
    let forwarded = believed.completed(hop, items(headers, &FORWARDED_PORT).next());
    drop_contradicting(headers, &forwarded);
    write_lists(headers, &forwarded, hop);
    for (name, value) in [(FORWARDED_PROTO, &forwarded.proto), (FORWARDED_HOST, &forwarded.host)] {
        set_if_absent(headers, name, value.as_deref());
    }
    add_via(headers);
}

/// What a trusted peer says.
///
/// Who writes `X-Forwarded-*` may have passed the caller's own `Forwarded` on: it is not asked for what they leave out.
fn believed(headers: &mut HeaderMap) -> Forwarded {
    let legacy = LEGACY.iter().any(|name| headers.contains_key(name));
    drop_malformed(headers);
    if legacy { legacy_forwarded(headers) } else { standard_forwarded(headers) }
}

impl Forwarded {
    /// What nobody said of scheme and host is as it reached this gateway.
    fn completed(self, hop: &Hop, port: Option<&str>) -> Self {
        let proto = self.proto.unwrap_or_else(|| if hop.https { "https" } else { "http" }.into());
        let reached = hop.host.as_ref().and_then(|host| host.to_str().ok());
        let reached = reached.map(|host| with_port(host, port, Some(&proto)));
        Self { nodes: self.nodes, host: self.host.or(reached), proto: Some(proto) }
    }

    /// Whether the other one says something else. Ports of addresses may be left out.
    fn contradicts(&self, other: &Self) -> bool {
        let differ = |ours: &Option<String>, theirs: &Option<String>| match (ours, theirs) {
            (Some(ours), Some(theirs)) => !ours.eq_ignore_ascii_case(theirs),
            (None, Some(_)) => true,
            (_, None) => false,
        };
        let other_way = self.nodes.len() != other.nodes.len()
            || self.nodes.iter().zip(&other.nodes).any(|(ours, theirs)| !ours.is(theirs));
        (!other.nodes.is_empty() && other_way)
            || differ(&self.proto, &other.proto)
            || differ(&self.host, &other.host)
    }
}

impl Node {
    /// Of `1.2.3.4`, `::1`, `[::1]`, either with a port, `unknown`, and `_name`.
    fn read(text: &str) -> Option<Self> {
        let hidden = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        if text.eq_ignore_ascii_case("unknown") || text.strip_prefix('_').is_some_and(hidden) {
            return Some(Self::Hidden(text.to_owned()));
        }
        if let Ok(socket) = text.parse::<SocketAddr>() {
            return Some(Self::Address(socket.ip().to_canonical(), Some(socket.port())));
        }
        let bracketed = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let address = match bracketed {
            Some(inner) => inner.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
            None => text.parse::<IpAddr>().ok(),
        };
        address.map(|address| Self::Address(address.to_canonical(), None))
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Address(ours, _), Self::Address(theirs, _)) => ours == theirs,
            (Self::Hidden(_), Self::Hidden(_)) => true,
            (Self::Address(..), Self::Hidden(_)) | (Self::Hidden(_), Self::Address(..)) => false,
        }
    }

    /// As an item of `X-Forwarded-For`, where readers expect bare addresses.
    fn item(&self) -> String {
        match self {
            Self::Address(address, _) => address.to_string(),
            Self::Hidden(_) => "unknown".to_owned(),
        }
    }

    /// As the value of `for`.
    fn value(&self) -> String {
        match self {
            Self::Address(IpAddr::V4(address), None) => address.to_string(),
            Self::Address(IpAddr::V4(address), Some(port)) => format!("\"{address}:{port}\""),
            Self::Address(IpAddr::V6(address), None) => format!("\"[{address}]\""),
            Self::Address(IpAddr::V6(address), Some(port)) => format!("\"[{address}]:{port}\""),
            Self::Hidden(name) => name.clone(),
        }
    }
}

/// What `X-Forwarded-*` and the like say. They have been checked.
fn legacy_forwarded(headers: &HeaderMap) -> Forwarded {
    let mut nodes: Vec<_> = items(headers, &FORWARDED_FOR).filter_map(Node::read).collect();
    if nodes.is_empty() {
        nodes.extend(items(headers, &REAL_IP).filter_map(Node::read).take(1));
    }
    let named = items(headers, &FORWARDED_PROTO).next().map(str::to_ascii_lowercase);
    let proto = named.or_else(|| SCHEMES.iter().find_map(|name| scheme(headers, name)));
    let host = items(headers, &FORWARDED_HOST).next();
    let port = items(headers, &FORWARDED_PORT).next();
    let host = host.map(|host| with_port(host, port, proto.as_deref()));
    Forwarded { nodes, proto, host }
}

fn scheme(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let said = items(headers, name).next()?.to_ascii_lowercase();
    match said.as_str() {
        "on" => Some("https".to_owned()),
        "off" => Some("http".to_owned()),
        _ => Some(said),
    }
}

/// `Forwarded` has no port of its own: it belongs to the host, unless it is the scheme's.
fn with_port(host: &str, port: Option<&str>, proto: Option<&str>) -> String {
    match port {
        Some(port) if port_of(host).is_none() && Some(port) != usual_port(proto) => {
            format!("{host}:{port}")
        }
        Some(_) | None => host.to_owned(),
    }
}

fn port_of(host: &str) -> Option<&str> {
    let behind = host.rsplit(']').next().unwrap_or_default();
    behind.split_once(':').map(|(_, port)| port)
}

fn usual_port(proto: Option<&str>) -> Option<&'static str> {
    match proto {
        Some("https" | "wss") => Some("443"),
        Some("http" | "ws") => Some("80"),
        Some(_) | None => None,
    }
}

/// What `Forwarded` says: of scheme and host, the first element that does. It has been checked.
fn standard_forwarded(headers: &HeaderMap) -> Forwarded {
    let mut forwarded = Forwarded::default();
    for line in headers.get_all(header::FORWARDED) {
        let elements = line.to_str().ok().and_then(|line| split_outside_quotes(line, ','));
        for element in elements.unwrap_or_default() {
            for (name, value) in pairs(element).unwrap_or_default() {
                if name.eq_ignore_ascii_case("for") {
                    forwarded.nodes.extend(Node::read(value));
                } else if name.eq_ignore_ascii_case("proto") {
                    forwarded.proto.get_or_insert_with(|| value.to_ascii_lowercase());
                } else if name.eq_ignore_ascii_case("host") {
                    forwarded.host.get_or_insert_with(|| value.to_owned());
                }
            }
        }
    }
    forwarded
}

/// The items of a comma list, over all its lines.
fn items<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim)
}

fn drop_malformed(headers: &mut HeaderMap) {
    let is_node: fn(&str) -> bool = |text| Node::read(text).is_some();
    for (name, is_fine) in [
        (FORWARDED_FOR, is_node),
        (REAL_IP, is_node),
        (FORWARDED_PROTO, is_scheme),
        (FORWARDED_HOST, |text| is_host(text.as_bytes())),
        (FORWARDED_PORT, |text| text.parse::<u16>().is_ok()),
    ] {
        remove_unless(headers, &name, |line| line.split(',').map(str::trim).all(is_fine));
    }
    for name in &SCHEMES {
        remove_unless(headers, name, is_scheme);
    }
    remove_unless(headers, &header::FORWARDED, is_forwarded);
}

fn remove_unless(headers: &mut HeaderMap, name: &HeaderName, is_fine: impl Fn(&str) -> bool) {
    if !headers.get_all(name).iter().all(|line| line.to_str().is_ok_and(&is_fine)) {
        headers.remove(name);
    }
}

/// RFC 3986, 3.1.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// Removes what a trusted peer has passed on unread, and what says something else than the headers that it has written.
fn drop_contradicting(headers: &mut HeaderMap, forwarded: &Forwarded) {
    if forwarded.contradicts(&standard_forwarded(headers)) {
        headers.remove(header::FORWARDED);
    }
    let proto = forwarded.proto.as_deref();
    for name in SCHEMES {
        if scheme(headers, &name).is_some_and(|said| proto != Some(&said)) {
            headers.remove(name);
        }
    }
    let is_stop = |text: &str| {
        Node::read(text).is_some_and(|node| forwarded.nodes.iter().any(|stop| stop.is(&node)))
    };
    if !items(headers, &REAL_IP).all(is_stop) {
        headers.remove(REAL_IP);
    }
    let port = forwarded.host.as_deref().map(|host| port_of(host).or_else(|| usual_port(proto)));
    if port.is_some_and(|port| items(headers, &FORWARDED_PORT).next() != port) {
        headers.remove(FORWARDED_PORT);
    }
}

/// Whether a `Forwarded` line parses: elements of `token=value` pairs, where `for` and `by` name nodes.
fn is_forwarded(line: &str) -> bool {
    let Some(elements) = split_outside_quotes(line, ',') else { return false };
    elements.iter().all(|element| {
        pairs(element).is_some_and(|pairs| {
            pairs.iter().all(|(name, value)| {
                let is = |ours: &str| name.eq_ignore_ascii_case(ours);
                let node = is("for") || is("by");
                HeaderName::from_bytes(name.as_bytes()).is_ok()
                    && (!node || Node::read(value).is_some())
                    && (!is("proto") || is_scheme(value))
                    && (!is("host") || is_host(value.as_bytes()))
            })
        })
    })
}

/// The pairs of one element, without quotes; none where one is malformed.
fn pairs(element: &str) -> Option<Vec<(&str, &str)>> {
    split_outside_quotes(element, ';')?.into_iter().map(split_pair).collect()
}

fn split_pair(pair: &str) -> Option<(&str, &str)> {
    let (name, value) = pair.trim().split_once('=')?;
    let bare = match value.strip_prefix('"') {
        Some(rest) => rest.strip_suffix('"')?,
        None if value.is_empty() || value.contains([':', '[', ' ', '"']) => return None,
        None => value,
    };
    Some((name, bare))
}

/// The pieces between separators outside quotes; none if a quote stays open.
fn split_outside_quotes(text: &str, separator: char) -> Option<Vec<&str>> {
    let (mut quoted, mut escaped) = (false, false);
    let pieces = text
        .split(|c: char| {
            let splits = c == separator && !quoted;
            let toggles = c == '"' && !escaped;
            escaped = quoted && c == '\\' && !escaped;
            quoted ^= toggles;
            splits
        })
        .collect();
    (!quoted).then_some(pieces)
}

/// Both lists: what was said goes on, what was not is made of what the peer said, and our hop comes last.
fn write_lists(headers: &mut HeaderMap, forwarded: &Forwarded, hop: &Hop) {
    let said = standard_forwarded(headers);
    let peer = hop.peer.map(|peer| Node::Address(peer.to_canonical(), None));
    let mut items = Vec::new();
    if !headers.contains_key(FORWARDED_FOR) {
        items.extend(forwarded.nodes.iter().map(Node::item));
    }
    items.extend(peer.iter().map(Node::item));
    extend_list(headers, FORWARDED_FOR, &items);

    // Where the caller's own element is ours to write, scheme and host stand there; else with our hop.
    let made = if said.nodes.is_empty() { forwarded.nodes.as_slice() } else { &[] };
    let mut facts = String::new();
    if let (Some(host), None) = (&forwarded.host, &said.host) {
        // It is made of what a host may hold: neither a quote nor a backslash.
        facts.push_str(&format!(";host=\"{host}\""));
    }
    if let (Some(proto), None) = (&forwarded.proto, &said.proto) {
        facts.push_str(&format!(";proto={proto}"));
    }
    let known = !said.nodes.is_empty() || !made.is_empty();
    let ours = match (peer, known) {
        (Some(peer), _) => Some(peer),
        // A unix socket has no address. Who is known by one already needs no other.
        (None, true) => None,
        (None, false) => Some(Node::Hidden("unknown".to_owned())),
    };
    let mut elements: Vec<_> =
        made.iter().chain(&ours).map(|node| format!("for={}", node.value())).collect();
    match elements.first_mut() {
        Some(first) => first.push_str(&facts),
        None if facts.is_empty() => {}
        None => elements.push(facts.trim_start_matches(';').to_owned()),
    }
    extend_list(headers, header::FORWARDED, &elements);
}

/// Adds items at the end of a comma list, and joins the list's lines into one.
fn extend_list(headers: &mut HeaderMap, name: HeaderName, items: &[String]) {
    let lines = headers.get_all(&name);
    let mut all: Vec<&str> = lines.iter().filter_map(|line| line.to_str().ok()).collect();
    all.extend(items.iter().map(String::as_str));
    if all.is_empty() {
        return;
    }
    if let Ok(list) = HeaderValue::from_str(&all.join(", ")) {
        headers.insert(name, list);
    }
}

fn set_if_absent(headers: &mut HeaderMap, name: HeaderName, value: Option<&str>) {
    let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) else { return };
    if let Entry::Vacant(entry) = headers.entry(name) {
        entry.insert(value);
    }
}

#[cfg(test)]
mod tests;
