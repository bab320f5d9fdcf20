//! Decides which addresses of a sink may be dialled.
//!
//! [`Rule::find`] resolves a name once and returns the addresses that the rule allows. Only these are dialled, so no second
//! look-up can give another address. Literal addresses are checked here, and once more when the sink is made. Odd spellings
//! of an address (`127.1`, `0x7f.1`) are not literals here: the system's resolver reads them, and its result is checked.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use async_trait::async_trait;

/// What is wrong with a port in a URL; `None`: each host has a valid port or no port.
///
/// The message repeats the port only if it cannot be part of a password. A slash in a password ends the authority too
/// early, and then a part of the password is in the place of the port.
#[must_use]
pub fn port_problem(url: &str) -> Option<String> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (authority, after) =
        rest.split_at_checked(rest.find(['/', '?', '#']).unwrap_or(rest.len()))?;
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => (Some(login), hosts),
        None => (None, authority),
    };
    let is_port = |port: &str| {
        let plain = port.bytes().all(|byte| byte.is_ascii_digit());
        plain && port.parse::<u16>().is_ok_and(|port| port > 0)
    };
    let mut named = hosts.split(',').filter_map(|host| host.rsplit_once(':'));
    // An address in brackets without a port ends with a bracket.
    let (host, port) = named.find(|(_, port)| !is_port(port) && !port.ends_with(']'))?;
    let wrong = if after.contains('@') {
        "has an invalid port; write a / in a password as %2F".to_owned()
    } else if login.is_some() || matches!(scheme, "http" | "https") {
        format!("has the invalid port {port:?}")
    } else {
        format!("has a colon and no port after {host:?}")
    };
    Some(format!("{wrong}; a port is a number from 1 to 65535"))
}

/// Which addresses may be dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Addresses that the public internet routes.
    pub public: bool,
    /// All others: private, loopback, link-local, metadata, multicast and reserved ones.
    pub private: bool,
}

impl Rule {
    /// The addresses of a host that may be dialled. The host is a literal address (in brackets or not) or a name.
    ///
    /// # Errors
    /// The name cannot be resolved, or none of its addresses may be dialled.
    pub async fn find(
        self,
        resolver: &dyn Resolve,
        host: &str,
        port: u16,
    ) -> io::Result<Vec<SocketAddr>> {
        let found = match host.trim_matches(['[', ']']).parse::<IpAddr>() {
            Ok(literal) => vec![SocketAddr::new(literal, port)],
            Err(_) => resolver.resolve(host, port).await?,
        };
        self.admit(found.into_iter())
    }

    /// Why `address` may not be dialled, with the setting that would allow it; `None`: it may.
    #[must_use]
    pub fn objection(self, address: IpAddr) -> Option<String> {
        match (is_public(address), self.public, self.private) {
            (true, true, _) | (false, _, true) => None,
            (true, false, _) => Some(format!(
                "{address} is a public address, and http is allowed for private ones only: use https, or set allow_http = true"
            )),
            (false, _, false) => Some(format!(
                "{address} is a private, local or reserved address: set allow_private = true to send there"
            )),
        }
    }

    /// The addresses in `found` that may be dialled.
    ///
    /// # Errors
    /// None may be dialled: the objection to the first.
    pub fn admit(self, found: impl Iterator<Item = SocketAddr>) -> io::Result<Vec<SocketAddr>> {
        let mut objection = None;
        let mut admitted = Vec::new();
        for address in found {
            match self.objection(address.ip()) {
                None => admitted.push(address),
                Some(why) => objection = objection.or(Some(why)),
            }
        }
        match objection {
            Some(why) if admitted.is_empty() => {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
            }
            Some(_) | None => Ok(admitted),
        }
    }
}

/// Whether the public internet routes `address`. An IPv6 address that carries an IPv4 address is judged by the latter.
#[must_use]
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !matches!(
        address.octets(),
        [0 | 10 | 127 | 224..=255, ..]
            | [100, 64..=127, ..]
            | [169, 254, ..]
            | [172, 16..=31, ..]
            | [192, 0, 0 | 2, _]
            | [192, 88, 99, _]
            | [192, 168, ..]
            | [198, 18 | 19, ..]
            | [198, 51, 100, _]
            | [203, 0, 113, _]
    )
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let embedded = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match address.segments() {
        // IPv4-mapped, NAT64 and 6to4.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            embedded(high, low)
        }
        [0x2002, high, low, ..] => embedded(high, low),
        // Teredo and other protocol assignments, documentation.
        [0x2001, 0..=0x1ff, ..] | [0x2001, 0xdb8, ..] | [0x3fff, 0..=0x0fff, ..] => false,
        // Global unicast. All others are loopback, local, multicast, translated or not assigned.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

/// Finds the addresses of names.
#[async_trait]
pub trait Resolve: fmt::Debug + Send + Sync {
    /// All addresses of a name.
    ///
    /// # Errors
    /// The name does not exist, or no resolver answers.
    async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>>;
}

/// The system's resolver.
#[derive(Clone, Copy, Debug)]
pub struct System;

#[async_trait]
impl Resolve for System {
    async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        tokio::net::lookup_host((host, port)).await.map(Iterator::collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, public: bool) {
        assert_eq!(is_public(text.parse().unwrap()), public, "{text}");
    }

    #[test]
    fn no_spelling_of_an_inner_address_counts_as_public() {
        for inner in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.168.0.1",
            "198.18.0.1",
            "203.0.113.7",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a9fe:a9fe::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            check(inner, false);
        }
        for outer in [
            "1.1.1.1",
            "100.128.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "::ffff:1.1.1.1",
            "64:ff9b::101:101",
            "2002:101:101::1",
            "2606:4700::1111",
            "2001:4860:4860::8888",
        ] {
            check(outer, true);
        }
    }

    #[test]
    fn of_a_name_with_inner_and_outer_addresses_only_the_outer_are_dialled() {
        let inner: SocketAddr = "10.0.0.1:0".parse().unwrap();
        let outer: SocketAddr = "1.1.1.1:0".parse().unwrap();
        let rule = Rule { public: true, private: false };
        assert_eq!(rule.admit([inner, outer].into_iter()).unwrap(), [outer]);
        let refused = rule.admit([inner].into_iter()).unwrap_err().to_string();
        assert!(refused.contains("10.0.0.1") && refused.contains("allow_private"), "{refused}");
    }

    #[test]
    fn plain_http_for_private_targets_does_not_open_public_ones() {
        let rule = Rule { public: false, private: true };
        assert_eq!(rule.objection("127.0.0.1".parse().unwrap()), None);
        assert!(rule.objection("1.1.1.1".parse().unwrap()).unwrap().contains("allow_http"));
    }

    #[tokio::test]
    async fn odd_spellings_of_loopback_are_refused_after_resolution() {
        for host in [
            "127.1",
            "2130706433",
            "0x7f.1",
            "0177.0.0.1",
            "localhost",
            "127.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
        ] {
            let rule = Rule { public: true, private: false };
            let refused = rule.find(&System, host, 80).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{host}: {refused}");
        }
        // Only some systems know this name. Its address is judged like any other.
        let rule = Rule { public: true, private: false };
        assert!(rule.find(&System, "localhost.", 80).await.is_err());
    }
}
