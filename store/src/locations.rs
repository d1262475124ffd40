//! Location hints: where the chunks of a layer lie. Written again when packs move; never the truth.

use crate::number;
use crate::objects::Store;
use layer::location::Locations;
use layer::{Error, ErrorKind, LayerId, Result};

/// The longest hint: 64 Mi chunks of a dozen bytes.
const MAX_LOCATIONS_BYTES: u64 = 1 << 30;
/// Tries to find a free number when others write hints of the same layer.
const MAX_ATTEMPTS: u32 = 64;
/// Older hints that are kept for readers that have just listed them.
const KEPT: u64 = 2;

impl Store {
    /// Publishes a new hint and returns its number; hints that it makes useless are removed.
    pub fn put_locations(&self, layer: &LayerId, locations: &Locations) -> Result<u64> {
        let bytes = locations.encode()?;
        let directory = directory(layer);
        let mut number = self.hints(layer)?.first().copied().unwrap_or(0);
        for _ in 0..MAX_ATTEMPTS {
            number += 1;
            match self.put_new(&number::key_in(&directory, number)?, &bytes) {
                Ok(()) => {
                    self.forget_old_hints(layer, number);
                    return Ok(number);
                }
                Err(error) if error.kind() == ErrorKind::Exists => {}
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(
            ErrorKind::Busy,
            format!("others keep writing the locations of layer {layer}"),
        ))
    }

    /// The newest readable hint, if there is any. A damaged one is passed over: it is only a hint.
    pub fn read_locations(&self, layer: &LayerId) -> Result<Option<Locations>> {
        for number in self.hints(layer)? {
            let key = number::key_in(&directory(layer), number)?;
            let read = self.backend().read_all(&key, MAX_LOCATIONS_BYTES);
            match read.and_then(|bytes| Locations::decode(&bytes)) {
                Ok(locations) => return Ok(Some(locations)),
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
                    tracing::warn!("locations {number} of layer {layer}: {}", error.chain());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Numbers, the highest first.
    fn hints(&self, layer: &LayerId) -> Result<Vec<u64>> {
        let names = self.list_names(&directory(layer))?;
        Ok(names.iter().filter_map(|name| number::number_of(name).ok()).collect())
    }

    /// Old hints only cost space, so a failure is told and no more.
    fn forget_old_hints(&self, layer: &LayerId, newest: u64) {
        let forget = || -> Result<()> {
            for number in self.hints(layer)?.into_iter().filter(|number| number + KEPT < newest) {
                self.backend().delete(&number::key_in(&directory(layer), number)?)?;
            }
            Ok(())
        };
        if let Err(error) = forget() {
            tracing::warn!("old locations of layer {layer} stay: {}", error.chain());
        }
    }
}

fn directory(layer: &LayerId) -> String {
    format!("locations/{layer}/")
}
