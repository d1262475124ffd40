//! What a collector may delete: listing all of it, and deleting one with everything that belongs to it.
//!
//! Nothing here decides. References, leases and the collector's own records are never collected.
//!
//! // CRASH: a layer's own object goes first, so that nobody finds it without its hints; what is left of it is
//! listed under its id again.

use crate::condemned::Collectable;
use crate::key::Key;
use crate::objects::{Store, sharded};
use crate::signatures::signatures_of;
use layer::reference::Target;
use layer::{Digest, EnvId, ErrorKind, LayerId, PackId, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// Framings by layer: the tar that it is of (the digest of the directory's name), and the object's name.
pub type Framings = BTreeMap<LayerId, Vec<(Digest, String)>>;

/// All that can be collected from a store, as listed at one time.
#[derive(Debug, Clone, Default)]
pub struct Stock {
    /// Packs.
    pub packs: BTreeSet<PackId>,
    /// Layers that are published.
    pub layers: BTreeSet<LayerId>,
    /// Environments that are published.
    pub environments: BTreeSet<EnvId>,
    /// Layers of which only something beside the layer is there.
    pub remains: BTreeSet<LayerId>,
    /// Environments of which only profiles or signatures are there.
    pub environment_remains: BTreeSet<EnvId>,
    /// Documents of container images.
    pub images: BTreeSet<Digest>,
    /// Tars of which a compression is kept: the digest of the directory's name, and that name.
    pub tars: BTreeMap<Digest, String>,
    /// Framings.
    pub framings: Framings,
}

impl Stock {
    /// Everything in it.
    pub fn all(&self) -> impl Iterator<Item = Collectable> {
        let environments = self.environments.iter().chain(&self.environment_remains);
        let layers = self.layers.iter().chain(&self.remains);
        environments
            .map(|id| Collectable::Environment(*id))
            .chain(self.images.iter().map(|id| Collectable::Image(*id)))
            .chain(layers.map(|id| Collectable::Layer(*id)))
            .chain(self.tars.keys().map(|id| Collectable::Tar(*id)))
            .chain(self.packs.iter().map(|id| Collectable::Pack(*id)))
    }
}

impl Store {
    /// Lists all that can be collected.
    pub fn stock(&self) -> Result<Stock> {
        let mut stock = Stock {
            packs: self.list_packs()?.into_iter().collect(),
            environments: self.list_environments()?.into_iter().collect(),
            layers: self.list_layers()?.into_iter().collect(),
            images: self.list_ids("images/")?.into_iter().collect(),
            ..Stock::default()
        };
        let mut beside: BTreeSet<LayerId> = self.parts_of("locations/", 1)?;
        beside.extend(self.parts_of::<LayerId>("spaces/", 1)?);
        beside.extend(self.parts_of::<LayerId>("profiles/layer/", 2)?);
        beside.extend(self.parts_of::<LayerId>("signatures/layer/", 2)?);
        stock.framings = self.framings()?;
        beside.extend(stock.framings.keys());
        for name in self.list_names("streams/")? {
            if let Some(tar) = name.split('/').nth(1) {
                stock.tars.entry(Digest::of(tar.as_bytes())).or_insert_with(|| tar.to_owned());
            }
        }
        stock.remains = beside.difference(&stock.layers).copied().collect();
        let mut beside: BTreeSet<EnvId> = self.parts_of("profiles/env/", 2)?;
        beside.extend(self.parts_of::<EnvId>("signatures/env/", 2)?);
        stock.environment_remains = beside.difference(&stock.environments).copied().collect();
        Ok(stock)
    }

    /// All framings.
    pub fn framings(&self) -> Result<Framings> {
        let mut framings = Framings::new();
        for name in self.list_names("framings/")? {
            let mut parts = name.split('/').skip(1);
            if let (Some(tar), Some(Ok(layer))) =
                (parts.next(), parts.next().map(LayerId::from_str))
            {
                let tar = Digest::of(tar.as_bytes());
                framings.entry(layer).or_default().push((tar, name));
            }
        }
        Ok(framings)
    }

    /// The ids that stand at this part of the names under a prefix.
    fn parts_of<T: FromStr + Ord>(&self, prefix: &str, part: usize) -> Result<BTreeSet<T>> {
        let names = self.list_names(prefix)?;
        let ids = names.iter().filter_map(|name| name.split('/').nth(part)?.parse().ok());
        Ok(ids.collect())
    }

    /// Deletes one thing with all that belongs to it. Returns the bytes of its objects. `stock` is the listing
    /// in which it was found. That it is gone already is success.
    pub fn collect(&self, what: &Collectable, stock: &Stock) -> Result<u64> {
        let mut bytes = 0;
        match what {
            Collectable::Pack(id) => bytes += self.remove(&sharded("packs", &id.to_string())?)?,
            Collectable::Image(id) => bytes += self.remove(&sharded("images", &id.to_string())?)?,
            Collectable::Environment(id) => {
                bytes += self.remove(&sharded("envs", &id.to_string())?)?;
                bytes += self.remove_all(&format!("profiles/env/{id}/"))?;
                bytes += self.remove_all(&signatures_of(&Target::Environment(*id)))?;
            }
            Collectable::Layer(id) => {
                bytes += self.remove(&sharded("layers", &id.to_string())?)?;
                bytes += self.remove_all(&format!("locations/{id}/"))?;
                bytes += self.remove_all(&format!("profiles/layer/{id}/"))?;
                bytes += self.remove_all(&signatures_of(&Target::Layer(*id)))?;
                bytes += self.remove(&Key::new(format!("spaces/{id}"))?)?;
                for (_, name) in stock.framings.get(id).into_iter().flatten() {
                    bytes += self.remove(&Key::new(name.as_str())?)?;
                }
            }
            Collectable::Tar(id) => {
                if let Some(tar) = stock.tars.get(id) {
                    bytes += self.remove_all(&format!("streams/{tar}/"))?;
                }
            }
        }
        Ok(bytes)
    }

    fn remove_all(&self, prefix: &str) -> Result<u64> {
        let mut bytes = 0;
        for name in self.list_names(prefix)? {
            bytes += self.remove(&Key::new(name)?)?;
        }
        Ok(bytes)
    }

    fn remove(&self, key: &Key) -> Result<u64> {
        let bytes = match self.backend().size(key) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
            Err(error) => return Err(error),
        };
        self.backend().delete(key)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;
    use std::sync::Arc;

    #[test]
    fn all_that_has_a_name_of_ours_is_listed_and_goes_with_what_belongs_to_it() {
        let store = Store::open(Arc::new(Memory::new())).unwrap();
        let [one, two] = [LayerId([1; 32]), LayerId([2; 32])];
        let tar = format!("sha256-{}", "ab".repeat(32));
        let names = [
            format!("layers/01/{one}"),
            format!("locations/{one}/18446744073709551614"),
            format!("spaces/{one}"),
            format!("profiles/layer/{one}/18446744073709551614"),
            format!("framings/{tar}/{one}"),
            format!("locations/{two}/18446744073709551614"),
            format!("streams/{tar}/sha256-00"),
            format!("packs/03/{}", PackId([3; 16])),
            format!("profiles/env/{}/18446744073709551614", EnvId([4; 32])),
            format!("images/05/{}", Digest([5; 32])),
            format!("signatures/layer/{one}/{}", Digest([6; 32])),
            format!("signatures/env/{}/{}", EnvId([7; 32]), Digest([6; 32])),
            "packs/zz/no-pack".to_owned(),
        ];
        for name in &names {
            store.put_new(&Key::new(name.as_str()).unwrap(), b"12345").unwrap();
        }
        let stock = store.stock().unwrap();
        let all: Vec<_> = stock.all().collect();
        assert_eq!(all.len(), 7, "{all:?}");
        assert_eq!(stock.remains, BTreeSet::from([two]));
        assert_eq!(store.collect(&Collectable::Layer(one), &stock).unwrap(), 30);
        assert_eq!(store.collect(&Collectable::Layer(one), &stock).unwrap(), 0);
        for what in all {
            store.collect(&what, &stock).unwrap();
        }
        assert_eq!(store.list_names("").unwrap(), ["FORMAT", "packs/zz/no-pack"]);
    }
}
