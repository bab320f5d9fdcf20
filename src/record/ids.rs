//! The names of things: records, owners, and what makes a scope.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

/// Longest key, in characters (all ASCII, so bytes too).
pub const KEY_MAX: usize = 255;
/// Longest tenant, in bytes of UTF-8.
pub const TENANT_MAX: usize = 255;

/// The id of a record, made by the gateway that reserves it. A row that is taken over after expiry gets a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId(Uuid);

impl RecordId {
    /// A new id. Version 7, only so that neighbours in time are neighbours in the index; nothing reads the time in it. Its
    /// random part is the system's: whoever may call the functions of a shared database must not be able to guess it.
    #[must_use]
    pub fn fresh() -> Self {
        Self(Uuid::now_v7())
    }
}

/// A random id that a process takes at its start, and anew whenever its lease has run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerId(Uuid);

impl OwnerId {
    /// A new random owner.
    #[must_use]
    pub fn fresh() -> Self {
        Self(Uuid::new_v4())
    }
}

macro_rules! uuid_newtype {
    ($name:ident) => {
        impl From<Uuid> for $name {
            fn from(id: Uuid) -> Self {
                Self(id)
            }
        }
        impl From<$name> for Uuid {
            fn from(id: $name) -> Self {
                id.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
        impl std::str::FromStr for $name {
            type Err = uuid::Error;
            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }
    };
}
uuid_newtype!(RecordId);
uuid_newtype!(OwnerId);

macro_rules! text_newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// From a store's row, which holds only what was checked before it was written.
            #[must_use]
            pub fn stored(text: &str) -> Self {
                Self(text.into())
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
text_newtype!(
    /// Whose key it is: 1 to 255 bytes of visible UTF-8.
    Tenant
);
text_newtype!(
    /// The route's operation name, or `METHOD path-template`.
    Operation
);
text_newtype!(
    /// The idempotency key: 1 to 255 characters of visible ASCII and space.
    Key
);

text_newtype!(
    /// Who asked: the verified subject, or a keyed digest of the credential.
    Caller
);

impl Tenant {
    /// Checks a tenant that comes from outside. `None`: empty, longer than 255 bytes, or with characters that cannot be seen.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let visible = |c: char| !c.is_control() && (!c.is_whitespace() || c == ' ');
        let fits = (1..=TENANT_MAX).contains(&text.len());
        let blank = text.trim().is_empty();
        (fits && !blank && text.chars().all(visible)).then(|| Self(text.into()))
    }
}

impl Operation {
    /// Checks an operation name of the configuration, by the same rule as a tenant.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Tenant::parse(text).map(|checked| Self(checked.0))
    }
}

impl Key {
    /// Checks a key that comes from outside. `None`: empty or blank, longer than 255 characters, or other than visible
    /// ASCII and space.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let visible = |b: u8| b == b' ' || b.is_ascii_graphic();
        let fits = (1..=KEY_MAX).contains(&text.len());
        let blank = text.trim().is_empty();
        (fits && !blank && text.bytes().all(visible)).then(|| Self(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_tenants_are_visible_text_of_bounded_length() {
        for (text, key, tenant) in [
            ("k", true, true),
            ("a b", true, true),
            (" ", false, false),
            ("", false, false),
            ("é", false, true),
            ("a\tb", false, false),
            ("a\u{0}b", false, false),
            ("a\u{2028}b", false, false),
        ] {
            assert_eq!(Key::parse(text).is_some(), key, "{text:?}");
            assert_eq!(Tenant::parse(text).is_some(), tenant, "{text:?}");
        }
        assert!(Key::parse(&"x".repeat(255)).is_some());
        assert!(Key::parse(&"x".repeat(256)).is_none());
    }
}
