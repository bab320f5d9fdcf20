//! Which events a sink wants: patterns of their types.
//!
//! What must stay true: an event is written for the sinks that want its type, whoever writes it, and for no other. So
//! everything that writes events asks [`TypeFilter::includes`], or says the same in its own words.

use crate::record::Operation;

/// A sink, and what it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscriber {
    /// The sink's name.
    pub sink: String,
    /// Which events it gets.
    pub events: TypeFilter,
}

/// Which events a sink gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TypeFilter {
    /// All of them.
    #[default]
    All,
    /// Those whose type one of these patterns matches.
    Matching(Vec<TypePattern>),
}

impl TypeFilter {
    /// Whether events of this type are among them.
    #[must_use]
    pub fn includes(&self, kind: &str) -> bool {
        match self {
            Self::All => true,
            Self::Matching(patterns) => patterns.iter().any(|pattern| pattern.matches(kind)),
        }
    }
}

/// A pattern of types: `*` stands for any text, also for none, and everything else for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypePattern(String);

impl TypePattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// No type looks like it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if Operation::parse(text).is_none() {
            return Err("is not 1 to 255 bytes of visible text".to_owned());
        }
        Ok(Self(text.to_owned()))
    }

    /// As it is written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it matches this type.
    #[must_use]
    pub fn matches(&self, kind: &str) -> bool {
        let mut parts = self.0.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(rest) = kind.strip_prefix(first) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        let Some(mut rest) = rest.strip_suffix(last) else { return false };
        for part in parts {
            let Some((_, after)) = rest.split_once(part) else { return false };
            rest = after;
        }
        true
    }
}

/// The names of those who want events of this type.
pub(super) fn subscribed_to(subscribers: &[Subscriber], kind: &str) -> Vec<String> {
    let subscribed = subscribers.iter().filter(|subscriber| subscriber.events.includes(kind));
    subscribed.map(|subscriber| subscriber.sink.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text_and_all_else_for_itself() {
        for (pattern, kind, matches) in [
            ("order.created", "order.created", true),
            ("order.created", "order.created2", false),
            ("order.*", "order.created", true),
            ("order.*", "order.", true),
            ("order.*", "orders.created", false),
            ("*", "x", true),
            ("**", "x", true),
            ("*.created", "order.created", true),
            ("*.created", "order.created.late", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "acb", false),
            ("ab*ba", "aba", false),
            ("order_%", "order.x", false),
            ("order?", "orders", false),
            ("Order.*", "order.created", false),
            ("é*", "été", true),
        ] {
            let read = TypePattern::parse(pattern).unwrap();
            assert_eq!(read.matches(kind), matches, "{pattern} {kind}");
        }
        assert!(TypePattern::parse("").is_err() && TypePattern::parse("a\nb").is_err());
    }
}
