//! Seeded mutations for the replay, which has no coverage to guide it: the same seed gives the same inputs.

/// Numbers from a seed: the output stream of BLAKE3.
pub struct Dice(blake3::OutputReader);

impl Dice {
    /// Dice for one target; every seed has its own sequence.
    pub fn new(target: &str, seed: u64) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(target.as_bytes());
        hasher.update(&seed.to_le_bytes());
        Self(hasher.finalize_xof())
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        (u64::from_le_bytes(bytes) % end as u64) as usize
    }
}

/// What parsers stumble over.
const ODD: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, u64::MAX];

/// Changes `input` in one to four places; `other` is a second input to take pieces from.
pub fn mutate(dice: &mut Dice, input: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..=dice.below(4) {
        if input.is_empty() {
            input.extend_from_slice(other);
            continue;
        }
        let at = dice.below(input.len());
        let end = (at + 1 + dice.below(64)).min(input.len());
        match dice.below(7) {
            0 => input[at] ^= 1 << dice.below(8),
            1 => input[at] = dice.below(256) as u8,
            2 => {
                let width = [1, 2, 4, 8][dice.below(4)].min(input.len() - at);
                let odd = ODD[dice.below(ODD.len())].to_le_bytes();
                input[at..at + width].copy_from_slice(&odd[..width]);
            }
            3 => drop(input.drain(at..end)),
            4 => {
                let piece = input[at..end].to_vec();
                let to = dice.below(input.len());
                input.splice(to..to, piece);
            }
            5 if !other.is_empty() => {
                let from = dice.below(other.len());
                let piece = other[from..(from + end - at).min(other.len())].to_vec();
                let replaced = at..(at + piece.len()).min(input.len());
                input.splice(replaced, piece);
            }
            _ => input.truncate(at),
        }
    }
}
