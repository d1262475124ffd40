//! Names and what they mean: references, ids, prefixes of ids.
//!
//! Which entry of a reference is current is always asked of the store, because others move references too; the
//! entries themselves never change and come from the catalog.

use crate::catalog::LayerRecord;
use crate::images::Images;
use layer::environment::Environment;
use layer::reference::{RefKind, Reference, ReferenceEntry, Target};
use layer::{EnvId, Error, ErrorKind, Result};
use store::Collectable;

/// The fewest digits that stand for an id.
const MIN_ID_DIGITS: usize = 8;
const ID_DIGITS: usize = 64;

/// What a name stands for.
#[derive(Debug)]
pub(crate) enum Resolved {
    Layer(LayerRecord),
    /// The layers are the bottom one first.
    Environment {
        id: EnvId,
        environment: Box<Environment>,
        layers: Vec<LayerRecord>,
    },
}

impl Images {
    /// A reference (`kind/name:tag`; without a kind it is an environment's) or an id, or enough of its digits.
    pub(crate) fn resolve(&self, name: &str) -> Result<Resolved> {
        match self.target_of(name)? {
            Target::Layer(id) => self.layer_record(&id).map(Resolved::Layer),
            Target::Environment(id) => {
                let environment = Box::new(self.environment(&id)?);
                let layers = environment.layers.iter().map(|layer| self.layer_record(layer));
                let layers = layers.collect::<Result<_>>().map_err(|error| {
                    let kind = error.kind();
                    Error::new(kind, format!("environment {id} cannot be used")).with_source(error)
                })?;
                Ok(Resolved::Environment { id, environment, layers })
            }
        }
    }

    fn target_of(&self, name: &str) -> Result<Target> {
        let digits = name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if digits && (MIN_ID_DIGITS..=ID_DIGITS).contains(&name.len()) {
            if let Some(target) = self.target_by_id(name)? {
                return Ok(target);
            }
            if name.len() == ID_DIGITS {
                return Err(Error::not_found(format!(
                    "no layer or environment {name}; `lamella ls` lists what there is"
                )));
            }
        }
        let reference = parse_reference(name)?;
        let entry = self.current(&reference)?.ok_or_else(|| no_such(&reference))?;
        entry.target.ok_or_else(|| {
            Error::not_found(format!(
                "{reference} was untagged; `lamella history {reference}` lists where it pointed"
            ))
        })
    }

    fn target_by_id(&self, digits: &str) -> Result<Option<Target>> {
        let layers = self.store.layers_like(digits)?;
        let environments = self.store.environments_like(digits)?;
        let targets = layers.into_iter().map(Target::Layer);
        let mut targets = targets.chain(environments.into_iter().map(Target::Environment));
        match (targets.next(), targets.next()) {
            (found, None) => Ok(found),
            (_, Some(_)) => Err(Error::invalid(format!(
                "{digits} stands for more than one id; give more digits"
            ))),
        }
    }

    fn environment(&self, id: &EnvId) -> Result<Environment> {
        if let Some(environment) = self.catalog.environment(id)? {
            return Ok(environment);
        }
        let environment = self.store.read_environment(id)?;
        self.catalog.put_environment(&environment)?;
        Ok(environment)
    }

    fn current(&self, reference: &Reference) -> Result<Option<ReferenceEntry>> {
        match self.store.current_number(reference)? {
            0 => Ok(None),
            number => self.entry(reference, number).map(Some),
        }
    }

    pub(crate) fn entry(&self, reference: &Reference, number: u64) -> Result<ReferenceEntry> {
        if let Some(entry) = self.catalog.entry(reference, number)? {
            return Ok(entry);
        }
        let entry = self.store.read_entry(reference, number)?;
        self.catalog.put_entry(reference, &entry)?;
        Ok(entry)
    }

    /// References that point somewhere. One whose entry is damaged is left out and named in the log, so that it
    /// does not hide the others.
    pub(crate) fn list_references(
        &self,
        kind: Option<RefKind>,
    ) -> Result<Vec<(Reference, ReferenceEntry)>> {
        let mut listed = Vec::new();
        for (reference, number) in self.store.list_references(kind)? {
            match self.entry(&reference, number) {
                Ok(entry) if entry.target.is_some() => listed.push((reference, entry)),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::warn!("left out of the list: {}", error.chain());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(listed)
    }

    /// All entries, the newest first.
    pub(crate) fn history(&self, reference: &Reference) -> Result<Vec<ReferenceEntry>> {
        let numbers = self.store.history_numbers(reference)?;
        if numbers.is_empty() {
            return Err(no_such(reference));
        }
        numbers.into_iter().map(|number| self.entry(reference, number)).collect()
    }

    /// Moves a reference; with `expected` only from that entry.
    pub(crate) fn tag(
        &self,
        reference: &Reference,
        target: Target,
        author: &str,
        expected: Option<u64>,
    ) -> Result<ReferenceEntry> {
        let lease = self.protect(match target {
            Target::Layer(id) => Collectable::Layer(id),
            Target::Environment(id) => Collectable::Environment(id),
        })?;
        let moved = self.moved(reference, Some(target), author, expected);
        self.give_back(&lease.id);
        moved
    }

    /// Makes a reference point nowhere; its history stays.
    pub(crate) fn untag(&self, reference: &Reference, author: &str) -> Result<ReferenceEntry> {
        match self.current(reference)? {
            Some(entry) if entry.target.is_some() => {
                self.moved(reference, None, author, Some(entry.number))
            }
            _ => Err(no_such(reference)),
        }
    }

    fn moved(
        &self,
        reference: &Reference,
        target: Option<Target>,
        author: &str,
        expected: Option<u64>,
    ) -> Result<ReferenceEntry> {
        let entry = self.store.move_reference(reference, target, author, expected)?;
        self.catalog.put_entry(reference, &entry)?;
        self.meters.reference_moves.add(1);
        Ok(entry)
    }
}

/// Without a kind in front a name is an environment's.
pub(crate) fn parse_reference(text: &str) -> Result<Reference> {
    let first = text.split('/').next().unwrap_or_default();
    match first.parse::<RefKind>() {
        Ok(_) if text.contains('/') => text.parse(),
        _ => format!("env/{text}").parse().map_err(|_| {
            Error::invalid(format!(
                "{text:?} is neither a reference (kind/name:tag) nor at least {MIN_ID_DIGITS} digits of an id"
            ))
        }),
    }
}

fn no_such(reference: &Reference) -> Error {
    Error::not_found(format!("no such reference {reference}; `lamella ls` lists what there is"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_a_kind_are_environments() {
        for (text, means) in [
            ("base/debian", "base/debian:latest"),
            ("python:3.12", "env/python:3.12"),
            ("team/python", "env/team/python:latest"),
            ("env", "env/env:latest"),
        ] {
            assert_eq!(parse_reference(text).unwrap().to_string(), means);
        }
        for bad in ["", "A", "base/", "x y", "base/X", "..", "a/../b"] {
            assert_eq!(parse_reference(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad}");
        }
    }
}
