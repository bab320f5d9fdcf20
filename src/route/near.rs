//! Explains why a request has a route or none. Searches as [`Routes::find`] does.

use http::Method;
use serde::Serialize;

use super::{Routes, decoded_then_split, split_then_decoded, template};

/// How many routes are shown that nearly match.
const NEAR_MAX: usize = 5;

/// One reading of a path, and its route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// The path in the spelling of the search: slashes and percent signs within a segment are escaped.
    pub path: String,
    /// The route that it names.
    pub route: Option<Named>,
}

/// A route by its names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Named {
    /// Its operation.
    pub operation: String,
    /// Its methods.
    pub methods: Vec<String>,
    /// Its path template.
    pub path: String,
}

/// A route that does not match, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Near {
    /// The route.
    #[serde(flatten)]
    pub route: Named,
    /// The part that does not match, as half a sentence.
    pub why_not: String,
}

/// The routes of both readings of a path, and other routes that nearly match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Look {
    /// Split, then decoded.
    pub split: Reading,
    /// Decoded, then split and resolved.
    pub decoded: Reading,
    /// The nearest other routes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub near: Vec<Near>,
}

impl Routes {
    /// Searches as [`Routes::find`] does, and describes the result.
    #[must_use]
    pub fn look(&self, method: &Method, path: &str) -> Look {
        let path = path.split('?').next().unwrap_or_default();
        let reading = |path: String| {
            let found = self.table(method).and_then(|table| self.look_up(table, &path));
            let index = found.map(|(index, _)| index);
            (Reading { route: index.and_then(|index| self.named(index)), path }, index)
        };
        let (split, first) = reading(split_then_decoded(path));
        let (decoded, second) = reading(decoded_then_split(path));
        let near = self.near(method, [&split.path, &decoded.path], [first, second]);
        Look { split, decoded, near }
    }

    fn named(&self, index: usize) -> Option<Named> {
        let (route, pattern) = (self.routes.get(index)?, self.patterns.get(index)?);
        let methods = pattern.methods.iter().map(ToString::to_string).collect();
        Some(Named { operation: route.operation.to_string(), methods, path: pattern.path.clone() })
    }

    /// The routes that differ in one thing only, the nearest first.
    fn near(&self, method: &Method, paths: [&str; 2], taken: [Option<usize>; 2]) -> Vec<Near> {
        let mut near: Vec<(u8, Near)> = Vec::new();
        let others = (0..self.routes.len()).filter(|index| !taken.contains(&Some(*index)));
        for index in others {
            let Some(route) = self.named(index) else { continue };
            let listed = route.methods.iter().any(|own| own.eq_ignore_ascii_case(method.as_str()));
            let Some((distance, why)) = paths
                .into_iter()
                .filter_map(|path| self.differs(&route.path, path))
                .min_by_key(|(distance, _)| *distance)
            else {
                continue;
            };
            let why_not = match (listed, distance) {
                (true, 0) => "another route names this path more exactly".to_owned(),
                (true, _) => why,
                (false, 0) => {
                    let own = route.methods.join(", ");
                    format!("the path fits, but the method is {method} and not {own}")
                }
                (false, _) => continue,
            };
            near.push((distance, Near { route, why_not }));
        }
        near.sort_by_key(|(distance, _)| *distance);
        near.truncate(NEAR_MAX);
        near.into_iter().map(|(_, near)| near).collect()
    }

    /// The one thing in which a path differs from a template; `None`: it differs in more.
    fn differs(&self, pattern: &str, path: &str) -> Option<(u8, String)> {
        let template = template(pattern, self.ignore_case).ok()?;
        let folded = if self.ignore_case { path.to_ascii_lowercase() } else { path.to_owned() };
        let wanted: Vec<&str> = template.trim_start_matches('/').split('/').collect();
        let given: Vec<&str> = folded.trim_start_matches('/').split('/').collect();
        let (head, rest) = match wanted.split_last() {
            Some((last, head)) if last.starts_with("{*") => (head, true),
            Some(_) | None => (wanted.as_slice(), false),
        };
        let fits =
            |(want, give): &(&&str, &&str)| want.contains('{') && !give.is_empty() || want == give;
        let pairs = || head.iter().zip(&given);
        let same = pairs().filter(fits).count();
        let longer = given.len() > head.len() && !rest;
        match (head.len().checked_sub(same)?, given.len() < head.len() || longer) {
            (0, false) => Some((0, String::new())),
            (0, true) => {
                let (has, wants) = (given.len(), head.len());
                let near = has.abs_diff(wants) == 1;
                near.then(|| (3, format!("the path has {has} segments and not {wants}")))
            }
            (1, false) => {
                let (want, give) = pairs().find(|pair| !fits(pair))?;
                if want.eq_ignore_ascii_case(give) {
                    let why = format!(
                        "{give:?} is {want:?} in other letters; see server.ignore_path_case"
                    );
                    return Some((1, why));
                }
                // A path that shares only wildcards with the template is a different path.
                let common = pairs().any(|(want, give)| want == give);
                common.then(|| (2, format!("the path says {give:?} and not {want:?}")))
            }
            (1, true) if head.len() == given.len() + 1 && same == given.len() => {
                Some((3, format!("the path has {} segments and not {}", given.len(), head.len())))
            }
            _ => None,
        }
    }
}
